"""Low-rank gradient sketches for linear layers; torch only, usable alone in anybody's loop."""
