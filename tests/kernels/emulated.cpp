// delta_net.cu for a CPU: launches by name, with the arguments of cuLaunchKernel.
#define EMULATED
#include "delta_net.cu"

namespace {
template <typename T>
T& at(void* argument) {
    return *static_cast<T*>(argument);
}
}  // namespace

extern "C" int emulate(const char* name, int blocks, int threads, int bytes, void** a) {
    const auto is = [&](const char* other) { return strcmp(name, other) == 0; };
    if (is("prepare")) {
        emulated::launch(blocks, threads, bytes, [=] {
            prepare(at<const u16*>(a[0]), at<i64>(a[1]), at<const u16*>(a[2]),
                    at<const float*>(a[3]), at<const BIAS*>(a[4]), at<Slots>(a[5]), at<Lists>(a[6]),
                    at<Chunks>(a[7]), at<u16*>(a[8]), at<int*>(a[9]));
        });
    } else if (is("chain")) {
        emulated::launch(blocks, threads, bytes, [=] {
            chain(at<Slots>(a[0]), at<Lists>(a[1]), at<Chunks>(a[2]), at<uint4*>(a[3]),
                  at<int*>(a[4]));
        });
    } else if (is("outputs")) {
        emulated::launch(blocks, threads, bytes, [=] {
            outputs(at<const u16*>(a[0]), at<i64>(a[1]), at<const float*>(a[2]), at<float>(a[3]),
                    at<Lists>(a[4]), at<Chunks>(a[5]), at<const u16*>(a[6]), at<u16*>(a[7]));
        });
    } else {
        return 1;
    }
    return 0;
}
