"""Sources of samples, one file each: ``open_source`` of a file gives the Source of a DataKeys.

The tables among them give rows instead, from which ``auto3d.data.prepared`` makes files that all ranks map to memory.
"""

ENDLESS = ("text", "synthetic")  # samples are drawn at random; there are no epochs
TABLES = {  # source -> the module that reads its rows
    "dataset": "auto3d.data.sources.saved_dataset",
    "json": "auto3d.data.sources.json_lines",
    "parquet": "auto3d.data.sources.parquet",
}
SOURCES = (*ENDLESS, "tokens", *TABLES)
BYTE_VALUES = 256  # tokens of the source text
