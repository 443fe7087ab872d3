"""A correction of the cost model by measured trials: AMP's alpha and beta (Li et al. 2022, sections 4.2 and 4.3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from auto3d.cost.estimate import Estimate

_DISTINCT = 1e-3  # if fractions of communication differ by less among trials, only one factor can be fitted


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Factors on an estimate's compute, with bubbles and updates, and on the communication that it does not hide."""

    compute: float = 1.0
    communication: float = 1.0

    def seconds(self, estimate: Estimate) -> float:
        compute, communication = _parts(estimate)
        return self.compute * compute + self.communication * communication


def correct(estimates: Sequence[Estimate], measured: Sequence[float]) -> Correction:
    """The factors with the least squared relative error; one common factor if the trials cannot separate the two."""
    if not estimates:
        return Correction()
    parts = np.array([_parts(estimate) for estimate in estimates])
    relative = parts / np.array(measured)[:, None]
    fractions = parts[:, 1] / parts.sum(axis=1)
    if fractions.max() - fractions.min() > _DISTINCT:
        compute, communication = np.linalg.lstsq(relative, np.ones(len(measured)), rcond=None)[0]
        if compute > 0 and communication >= 0:
            return Correction(compute=float(compute), communication=float(communication))
    both = relative.sum(axis=1)
    factor = float(both.sum() / (both**2).sum())
    return Correction(compute=factor, communication=factor)


def _parts(estimate: Estimate) -> tuple[float, float]:
    communication = estimate.tensor_s + estimate.message_s + estimate.sync_s
    return estimate.seconds - communication, communication
