// Bandwidth of movers, one or many at once, and movers that run beside something else (GEMM interference).
#include <chrono>
#include <memory>
#include <thread>

#include "launch.cuh"

namespace moe_tk_probe {
namespace {

std::vector<mover> make_movers(const mover_request *requests, int count, uint64_t bytes) {
    std::vector<mover> movers;
    movers.reserve(count);
    for (int i = 0; i < count; ++i) movers.emplace_back(requests[i], bytes);
    return movers;
}

// All movers wait for the gate, so that they move at the same time whatever the launch order.
std::vector<double> run_together(std::vector<mover> &movers, const gate &g, const std::vector<uint64_t> &passes,
                                 double limit_s) {
    g.clear();
    for (size_t i = 0; i < movers.size(); ++i) movers[i].launch(g, passes[i], limit_s);
    std::this_thread::sleep_for(std::chrono::milliseconds(1)); // launches reach their GPUs
    g.set(g.go());
    std::vector<double> rates;
    for (mover &m : movers) rates.push_back(m.rate());
    return rates;
}

struct traffic {
    gate g;
    std::vector<mover> movers;
};
std::unique_ptr<traffic> running;

} // namespace
} // namespace moe_tk_probe

// count movers at once; every measurement lasts about `seconds`; gbs: the median of `repeats` for each mover.
// Movers whose rates differ are given work in proportion, so that all stay busy until about the same moment.
MOE_TK_PROBE_API int moe_tk_probe_rate(const moe_tk_probe::mover_request *requests, int count, uint64_t bytes,
                                       double seconds, int repeats, double limit_s, double *gbs) {
    using namespace moe_tk_probe;
    return guarded([&] {
        if (bytes == 0 || bytes % WORD_CHUNK) throw std::runtime_error("rate: bytes must be a multiple of 65536");
        gate g;
        std::vector<mover> movers = make_movers(requests, count, bytes);
        std::vector<uint64_t> passes(count, 1);
        const std::vector<double> first = run_together(movers, g, passes, limit_s);
        for (int i = 0; i < count; ++i) {
            const double wanted = first[i] * 1e9 * seconds / double(movers[i].bytes_per_pass());
            passes[i] = std::max<uint64_t>(1, uint64_t(wanted + 0.5));
        }
        std::vector<std::vector<double>> samples(count);
        for (int n = 0; n < repeats; ++n) {
            const std::vector<double> rates = run_together(movers, g, passes, limit_s);
            for (int i = 0; i < count; ++i) samples[i].push_back(rates[i]);
        }
        for (int i = 0; i < count; ++i) {
            std::sort(samples[i].begin(), samples[i].end());
            gbs[i] = samples[i][samples[i].size() / 2];
        }
    });
}

// Starts movers that run until moe_tk_probe_traffic_stop, or for limit_s; they are moving when this returns.
MOE_TK_PROBE_API int moe_tk_probe_traffic_start(const moe_tk_probe::mover_request *requests, int count, uint64_t bytes,
                                                double limit_s) {
    using namespace moe_tk_probe;
    return guarded([&] {
        if (running) throw std::runtime_error("traffic is already running");
        auto t = std::make_unique<traffic>();
        t->movers = make_movers(requests, count, bytes);
        for (mover &m : t->movers) m.launch(t->g, 0, limit_s);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        t->g.set(t->g.go());
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        running = std::move(t);
    });
}

// gbs: what each mover reached (0 for parked ones).
MOE_TK_PROBE_API int moe_tk_probe_traffic_stop(double *gbs) {
    using namespace moe_tk_probe;
    return guarded([&] {
        if (!running) throw std::runtime_error("no traffic is running");
        auto t = std::move(running);
        t->g.set(t->g.stop());
        for (size_t i = 0; i < t->movers.size(); ++i) gbs[i] = t->movers[i].rate();
    });
}
