"""The exceptions a user can meet. Every message says who, what was found, what was needed and what would work."""


class MiniDeepInferError(Exception):
    """Base of every error this project raises for a user's mistake or a broken input."""


class ConfigError(MiniDeepInferError):
    """An engine or model configuration that cannot be right."""


class CheckpointError(MiniDeepInferError):
    """A checkpoint that is incomplete, damaged or not of the released layout; names the tensor and the file."""


class PluginError(MiniDeepInferError):
    """A plugin that cannot be loaded or registers something illegal; names the distribution."""


class OperatorError(MiniDeepInferError):
    """An operator that is unknown, or cannot serve the problem it was chosen for; lists what would work."""


class RequestError(MiniDeepInferError):
    """A prompt or sampling parameters the engine cannot serve; nothing was queued."""


class RankError(MiniDeepInferError):
    """A rank of several failed, died, did not come, or differs from the others; names it and the cause."""


class VerificationError(MiniDeepInferError):
    """A golden directory that is incomplete or does not belong to the checkpoint beside it."""
