"""Images of chats: finding them in messages, decoding them in a helper process, and placing their tokens."""
