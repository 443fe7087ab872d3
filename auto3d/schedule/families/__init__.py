"""One file per schedule. Each defines ``FAMILY``; ``SCHEDULES`` in ``auto3d.schedule`` lists the files."""
