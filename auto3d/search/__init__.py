"""Search space -> ranked Plans. Only a search decides on a Plan; everything else carries it out."""
