"""The OpenAI API over HTTP, in the server's own process and event loop."""
