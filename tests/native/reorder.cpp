// The shipped templates and wires over a network that reorders, and wrong copies of them that must be found.
#include "network.hpp"
#include "world.hpp"

using namespace native;
using protocol::counter_wire;
using protocol::fenced_wire;
using protocol::slot_wire;

// The slot is stored before the data that it announces.
struct signal_first_wire : fenced_wire<network_link> {
    struct pending { void *to; std::vector<char> bytes; };
    static std::vector<pending> &held() {
        thread_local std::vector<pending> puts;
        return puts;
    }
    static void put(void *to, const void *from, int64_t bytes) {
        const char *begin = static_cast<const char *>(from);
        held().push_back({to, {begin, begin + bytes}});
    }
    static void signal(uint32_t *slot, uint32_t epoch) {
        fenced_wire<network_link>::signal(slot, epoch);
        for (const auto &put : held()) network_link::copy(put.to, put.bytes.data(), int64_t(put.bytes.size()), 0, 1);
        held().clear();
    }
};

template <class Wire, class Dispatch = hooks::push_rows>
int run_calls(const options &o, network_rules rules) {
    const shape s = shape_of(o);
    auto memories = make_memories<Wire>(s, o);
    network between(rules, o.seed);
    the_network = &between;
    for (int viewer = 0; viewer < s.world; ++viewer) {
        for (int owner = 0; owner < s.world; ++owner) {
            auto &there = *memories[size_t(owner)];
            there.poison_buffers(true);
            char *&base = memories[size_t(viewer)]->heap.base[owner];
            if (owner != viewer) base = between.add_view(viewer, base, there.block, there.heap_bytes);
        }
    }
    between.start();
    verdict result;
    run_ranks<Wire, Dispatch>(s, o, memories, result);
    char text[160];
    std::snprintf(text, sizeof(text), ", \"delivered\": %lld, \"overtaken\": %lld, \"lost\": %lld",
                  static_cast<long long>(between.delivered()), static_cast<long long>(between.overtaken()),
                  static_cast<long long>(between.lost()));
    return report(o, result, text);
}

int main(int argc, char **argv) {
    const options o = read_options(argc, argv);
    network_rules rules;
    if (o.network == "fences") rules.releases_order = false;   // a release store goes another way than the data
    else if (o.network == "releases") rules.fences_order = false;
    else if (o.network == "nothing") rules.releases_order = rules.fences_order = false;
    else if (o.network == "lossy") rules.loses_increments = true;
    if (o.wire == "pcie") return run_calls<fenced_wire<network_link>>(o, rules);
    if (o.wire == "shm") return run_calls<slot_wire<network_link>>(o, rules);
    if (o.wire == "nvlink") return run_calls<counter_wire<network_link>>(o, rules);
    if (o.wire == "signal_first") return run_calls<signal_first_wire>(o, rules);
    if (o.wire == "pulling") return run_calls<slot_wire<network_link>, hooks::pull_rows>(o, rules);
    std::fprintf(stderr, "unknown wire %s\n", o.wire.c_str());
    return 2;
}
