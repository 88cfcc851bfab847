"""Ray clusters: what the launcher sends to other machines, and what runs there."""
