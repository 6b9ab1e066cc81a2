// Gated delta net for one model's heads: HK, HV (of keys, of values), BIAS (type of dt_bias).
// PARTS: blocks that share a head's values in the chain of states. *_COUNT: places in
// Lists::counts.
#include "outputs.cuh"
#include "prepare.cuh"

static_assert(sizeof(Preparing) <= PREPARE_BYTES && sizeof(Chaining) <= CHAIN_BYTES &&
                  sizeof(Output) <= OUTPUTS_BYTES,
              "delta_net_hopper.py knows these sizes");
