"""Programs that made the embedded demo model: data, training, export and evaluation."""
