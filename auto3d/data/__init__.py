"""Training data: the samples of each micro-batch, which do not depend on the parallel degrees.

Sample number i of the training is the same for every Plan. A stage reads only the inputs that it uses, or the first
stage reads for all (``TrainingData.read_once``).
"""

from auto3d.data.batches import Batches as Batches
from auto3d.data.field import KINDS as KINDS
from auto3d.data.field import SEQUENCE_KINDS as SEQUENCE_KINDS
from auto3d.data.field import TOKEN_KINDS as TOKEN_KINDS
from auto3d.data.field import InputField as InputField
from auto3d.data.interface import IGNORED as IGNORED
from auto3d.data.interface import BatchSlice as BatchSlice
from auto3d.data.interface import DataError as DataError
from auto3d.data.interface import MicroBatches as MicroBatches
from auto3d.data.interface import Reading as Reading
from auto3d.data.interface import TrainingData as TrainingData
from auto3d.data.settings import DataSettings as DataSettings
from auto3d.data.sources import SOURCES as SOURCES
