// A world of ranks in one process: their memory, one thread each, and the verdict.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "driver.hpp"

namespace native {

inline bool take_option(options &o, const std::string &key, const std::string &value) {
    static const std::pair<const char *, mutant> MUTANTS[] = {
        {"none", mutant::none}, {"early_election", mutant::early_election}, {"frozen_epoch", mutant::frozen_epoch},
        {"no_barrier", mutant::no_barrier}, {"remote_poll", mutant::remote_poll}, {"ring_ignored", mutant::ring_ignored},
        {"long_warmup", mutant::long_warmup}, {"skip_refresh", mutant::skip_refresh}};
    if (key == "wire") o.wire = value;
    else if (key == "pattern") o.pattern = value;
    else if (key == "network") o.network = value;
    else if (key == "scenario") o.scenario = value;
    else if (key == "seed") o.seed = std::strtoull(value.c_str(), nullptr, 0);
    else if (key == "first_call") o.first_call = std::strtoll(value.c_str(), nullptr, 0);
    else if (key == "calls") o.calls = std::strtoll(value.c_str(), nullptr, 0);
    else if (key == "world") o.world = std::atoi(value.c_str());
    else if (key == "first_epoch") o.first_epoch = uint32_t(std::strtoul(value.c_str(), nullptr, 0));
    else if (key == "timeout_s") o.timeout_s = std::atof(value.c_str());
    else if (key == "pull") o.pull = value == "1";
    else if (key == "frozen") o.frozen = value == "1";
    else if (key == "delays") o.delays = std::atoi(value.c_str());
    else if (key == "mutant") {
        for (const auto &[name, which] : MUTANTS) {
            if (value == name) { o.wrong = which; return true; }
        }
        return false;
    } else return false;
    return true;
}

inline options read_options(int argc, char **argv) {
    options o;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        const size_t at = word.find('=');
        if (at == std::string::npos || !take_option(o, word.substr(0, at), word.substr(at + 1))) {
            std::fprintf(stderr, "unknown option %s\n", argv[i]);
            std::exit(2);
        }
    }
    return o;
}

inline shape shape_of(const options &o) {
    shape s;
    s.world = o.world;
    s.num_experts = o.world + 2;  // ranks own different numbers of experts
    s.segments = o.frozen ? 1 : 3;
    return s;
}

template <class Wire>
std::vector<std::unique_ptr<rank_memory>> make_memories(const shape &s, const options &o) {
    std::vector<std::unique_ptr<rank_memory>> memories;
    for (int r = 0; r < s.world; ++r) memories.push_back(std::make_unique<rank_memory>(s, r, o.first_epoch, Wire::COUNTS, o.wrong));
    for (int viewer = 0; viewer < s.world; ++viewer) {
        for (int owner = 0; owner < s.world; ++owner) memories[size_t(viewer)]->heap.base[owner] = memories[size_t(owner)]->block.get();
    }
    return memories;
}

inline int report(const options &o, verdict &result, const std::string &more) {
    std::printf("{\"verdict\": \"%s\", \"what\": \"%s\", \"tokens_checked\": %lld, \"calls\": %lld%s}\n",
                result.failed() ? result.kind().c_str() : "passed", result.text().c_str(), static_cast<long long>(result.checked()),
                static_cast<long long>(o.calls), more.c_str());
    return result.failed() ? 1 : 0;
}

template <class Wire, class Dispatch>
void run_ranks(const shape &s, const options &o, std::vector<std::unique_ptr<rank_memory>> &memories, verdict &result,
               const fault_hooks &hooks = {}) {
    const model m(s, o.seed);
    delay_level = o.delays;
    delay_seed = o.seed * 1000;
    std::vector<protocol::control_block *> controls;
    for (const auto &memory : memories) controls.push_back(reinterpret_cast<protocol::control_block *>(memory->block.get()));
    std::barrier<> rendezvous(s.world);
    std::vector<std::thread> threads;
    for (int r = 0; r < s.world; ++r) {
        threads.emplace_back([&, r] {
            driver<Wire, Dispatch>(s, m, o, *memories[size_t(r)], controls, rendezvous, result, hooks).run();
        });
    }
    for (auto &thread : threads) thread.join();
}

}  // namespace native
