"""verl's folder of what asks a SandboxFusion service."""
