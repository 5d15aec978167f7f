// Bandwidth of the copy engines: GPU to GPU, GPU to pinned host memory and back, alone or several at once.
#include <algorithm>
#include <vector>

#include "support.cuh"

namespace moe_tk_probe {
namespace {

struct copy_job {
    buffer from, to;
    stream on;
    cudaEvent_t began, ended;

    copy_job(int source, int target, uint64_t bytes)
        : from(source, bytes), to(target, bytes), on(source == HOST ? target : source) {
        from.fill(0x5a);
        to.fill(0);
        enable_peer(on.device(), source == HOST ? HOST : target);
        MOE_TK_PROBE_CHECK(cudaSetDevice(on.device()));
        MOE_TK_PROBE_CHECK(cudaEventCreate(&began));
        MOE_TK_PROBE_CHECK(cudaEventCreate(&ended));
    }
    copy_job(copy_job &&) = default;

    void enqueue(int copies) {
        MOE_TK_PROBE_CHECK(cudaSetDevice(on.device()));
        MOE_TK_PROBE_CHECK(cudaEventRecord(began, on.get()));
        for (int i = 0; i < copies; ++i) {
            MOE_TK_PROBE_CHECK(cudaMemcpyAsync(to.as(), from.as(), from.bytes(), cudaMemcpyDefault, on.get()));
        }
        MOE_TK_PROBE_CHECK(cudaEventRecord(ended, on.get()));
    }
    double seconds() {
        on.wait();
        float ms = 0;
        MOE_TK_PROBE_CHECK(cudaEventElapsedTime(&ms, began, ended));
        return ms / 1e3;
    }
};

} // namespace
} // namespace moe_tk_probe

// count copies at once (source or target -1: pinned host memory), each repeated for about `seconds`; gbs: each one's rate.
MOE_TK_PROBE_API int moe_tk_probe_copy_engine(const int *sources, const int *targets, int count, uint64_t bytes,
                                              double seconds, int repeats, double *gbs) {
    using namespace moe_tk_probe;
    return guarded([&] {
        std::vector<copy_job> jobs;
        jobs.reserve(count);
        for (int i = 0; i < count; ++i) jobs.emplace_back(sources[i], targets[i], bytes);
        std::vector<int> copies(count, 2);
        for (auto &job : jobs) job.enqueue(2);
        for (int i = 0; i < count; ++i) {
            const double each = jobs[i].seconds() / 2;
            copies[i] = std::max(2, std::min(1000, int(seconds / std::max(each, 1e-6))));
        }
        std::vector<std::vector<double>> samples(count);
        for (int n = 0; n < repeats; ++n) {
            for (int i = 0; i < count; ++i) jobs[i].enqueue(copies[i]);
            for (int i = 0; i < count; ++i) {
                samples[i].push_back(double(bytes) * copies[i] / jobs[i].seconds() / 1e9);
            }
        }
        for (int i = 0; i < count; ++i) {
            std::sort(samples[i].begin(), samples[i].end());
            gbs[i] = samples[i][samples[i].size() / 2];
        }
        for (auto &job : jobs) {
            cudaEventDestroy(job.began);
            cudaEventDestroy(job.ended);
        }
    });
}
