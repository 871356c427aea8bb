"""Drop-ins for other trainers; each module names what it replaces. Importing one imports only what it needs."""
