"""Rules of style that a machine can check, so that no review has to."""
