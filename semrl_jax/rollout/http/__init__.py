"""HTTP for OpenAI's clients and verifiers': answered by the service that answers gRPC."""
