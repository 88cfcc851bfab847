"""The client's half: from a trained model to a reply."""
