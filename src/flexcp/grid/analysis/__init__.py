"""How a grid is proved exact: ranges of a mask over rectangles, and a descent into them."""
