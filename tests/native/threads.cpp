// The shipped templates over memory that all ranks share, for ThreadSanitizer: threads=ranks and blocks, random delays.
#include "faults.hpp"
#include "world.hpp"

using namespace native;
using protocol::mapped_link;

// A release that was forgotten: ThreadSanitizer must see it.
struct relaxed_wire : protocol::slot_wire<mapped_link> {
    static void signal(uint32_t *slot, uint32_t epoch) { platform::store_relaxed<platform::scope::system>(slot, epoch); }
};

template <class Wire, class Dispatch>
int run_calls(const options &o) {
    const shape s = shape_of(o);
    auto memories = make_memories<Wire>(s, o);
    verdict result;
    run_ranks<Wire, Dispatch>(s, o, memories, result);
    return report(o, result, "");
}

int main(int argc, char **argv) {
    const options o = read_options(argc, argv);
    if (o.scenario != "calls" && o.scenario != "idle") return run_fault(o);
    if (o.wire == "pcie") return run_calls<protocol::pcie_wire, hooks::push_rows>(o);
    if (o.wire == "relaxed") return run_calls<relaxed_wire, hooks::push_rows>(o);
    if (o.wire == "nvlink") {
        return o.pull ? run_calls<protocol::nvlink_wire, hooks::pull_rows>(o) : run_calls<protocol::nvlink_wire, hooks::push_rows>(o);
    }
    return o.pull ? run_calls<protocol::shm_wire, hooks::pull_rows>(o) : run_calls<protocol::shm_wire, hooks::push_rows>(o);
}
