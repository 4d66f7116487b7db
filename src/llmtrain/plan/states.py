"""Bytes of what training adds to the weights, from their number. Without torch."""


def optimizer_bytes(optimizer: str, trained_bytes: int, matrices: int, element_size: int = 4) -> int:
    """The optimizer's averages: two per trained weight, or one for the weights of `matrices` with muon. Those of
    adafactor are a row and a column per matrix: negligible."""
    if optimizer == "adafactor":
        return 0
    averages = 2 * trained_bytes
    if optimizer == "muon":
        averages -= matrices * element_size
    return averages


def training_bytes(optimizer: str, trained: int, matrices: int, element_size: int = 4) -> int:
    """A gradient per trained weight, and the optimizer's averages."""
    trained_bytes = element_size * trained
    return trained_bytes + optimizer_bytes(optimizer, trained_bytes, matrices, element_size)
