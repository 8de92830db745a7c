"""A target, a drafter and how they are served: `description` has the keys, `layers` reads them."""
