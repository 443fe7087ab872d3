"""Where the metrics of a training go, besides the terminal."""
