"""The process of a rank: how it meets the others, its device, its cores, its environment and its threads."""
