"""Pictures of chats: found in messages, decoded and resized in a helper process, and set in their places."""
