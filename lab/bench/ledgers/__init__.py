"""Made-up documents with questions whose answers stand in them: what the demo model is trained on and
what page formats are measured with. Standard library only; a seed is a document, for ever."""
