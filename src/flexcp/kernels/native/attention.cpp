// Attention on a CPU, forward and backward: the mask is data, as for the Triton kernels.
//
// Queries and keys are cut into tiles of TILE rows. Lists name the tiles of each query tile that are
// full, and those that are partial together with a bit for each pair. Everything is computed in
// float32; q, k, v and the result's gradient may be half types. Queries are scaled before they are
// multiplied: so both passes have the same scores to the last bit, and a weight of 1 stays one
// however large they are. Each number of the results is
// written by one task, which adds in a fixed order: the same call gives the same bits.
#include <new>

#include "backward.h"
#include "forward.h"

extern "C" {

// What `library.py` compares with its own, and asks.
int64_t flexcp_tile() { return TILE; }
int64_t flexcp_call_bytes() { return sizeof(Call); }
int64_t flexcp_has_float16() { return HAS_FLOAT16; }

// 0 if all went well, 1 without memory.
int64_t flexcp_forward(const Call* call) {
    try {
        return call->row_hash ? forward<true>(*call) : forward<false>(*call);
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

int64_t flexcp_deltas(const Call* call) { return find_deltas(*call); }

int64_t flexcp_backward(const Call* call) {
    try {
        return call->row_hash ? backward<true>(*call) : backward<false>(*call);
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // extern "C"
