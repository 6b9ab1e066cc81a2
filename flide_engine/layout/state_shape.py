"""How much one page and one slot of a model hold; numbers only, so that models and pool can both
use it.
"""

from dataclasses import dataclass

from flide_engine.config import GRAIN

STATE_ITEMSIZE = 4
"""Bytes of one element of a recurrent state: always float32."""

SMALLEST_UNIT, ALIGNMENT = 4096, 128
"""Bytes of a unit where a model's page is smaller (it may have no attention layer at all), and what
every unit is a multiple of.
"""


@dataclass(frozen=True)
class StateShape:
    """The state a model keeps per grain (keys, values) and per position it can resume from (the
    rest).
    """

    attention_layers: int
    kv_heads: int
    head_dim: int
    recurrent_layers: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_rows: int

    def page_bytes(self, itemsize: int) -> int:
        """Bytes of one page: keys and values of one grain, `itemsize` bytes an element."""
        return 2 * self.attention_layers * GRAIN * self.kv_heads * self.head_dim * itemsize

    def slot_bytes(self, itemsize: int) -> int:
        """Bytes of one slot: recurrent states, and convolution rows of `itemsize` bytes an
        element.
        """
        state = self.value_heads * self.key_dim * self.value_dim * STATE_ITEMSIZE
        return self.recurrent_layers * (state + self.conv_rows * self.conv_channels * itemsize)

    def unit_bytes(self, itemsize: int) -> int:
        """Bytes of a unit of memory, which holds one page."""
        return -(-max(self.page_bytes(itemsize), SMALLEST_UNIT) // ALIGNMENT) * ALIGNMENT

    def slot_units(self, itemsize: int) -> int:
        """Units that a slot takes; one even where a model has no recurrent state."""
        return max(1, -(-self.slot_bytes(itemsize) // self.unit_bytes(itemsize)))
