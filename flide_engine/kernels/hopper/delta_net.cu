// Gated delta net for one model's heads: HK, HV (of keys, of values), BIAS (type of dt_bias).
#include "outputs.cuh"
#include "prepare.cuh"

static_assert(sizeof(Preparing) <= PREPARE_BYTES && sizeof(Chaining) <= CHAIN_BYTES &&
                  sizeof(Output) <= OUTPUTS_BYTES,
              "delta_net_hopper.py knows these sizes");
