"""What Headrace can say of itself in other tools' words."""
