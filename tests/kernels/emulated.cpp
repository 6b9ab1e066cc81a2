// A source file of kernels/hopper for a CPU: its kernels by name, with the arguments of
// cuLaunchKernel. SOURCE: the file; ENTRIES: ENTRY(name) of each kernel.
#define EMULATED
#include SOURCE

#include <utility>

namespace {
template <typename... A, size_t... I>
std::function<void()> call(void (*kernel)(A...), void** a, std::index_sequence<I...>) {
    return [=] { kernel(*static_cast<std::remove_reference_t<A>*>(a[I])...); };
}
template <typename... A>
std::function<void()> call(void (*kernel)(A...), void** a) {
    return call(kernel, a, std::index_sequence_for<A...>());
}
}  // namespace

extern "C" int emulate(const char* name, int blocks, int threads, int bytes, void** a) {
#define ENTRY(kernel)                                              \
    if (strcmp(name, #kernel) == 0) {                              \
        emulated::launch(blocks, threads, bytes, call(kernel, a)); \
        return 0;                                                  \
    }
    ENTRIES
    return 1;
}
