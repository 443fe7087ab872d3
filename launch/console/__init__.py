"""What people read: progress, tables, rankings, drawings."""
