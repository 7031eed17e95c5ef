"""How the embedded demo model was made: data, training, export and evaluation."""
