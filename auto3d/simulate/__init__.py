"""Operations and their times -> a timeline, its figures, and its drawings. Nothing here knows a schedule by name."""
