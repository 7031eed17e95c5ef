"""Images in chats: found in messages, decoded in a helper process, and placed in the prompt."""
