// One decode step of some heads, from the decision to the output.

#pragma once

#include <atomic>
#include <numeric>

#include "recorded.h"
#include "splits.h"

namespace {

constexpr int64_t MOST_HEADS = 4;  // of a share: its scans keep estimates of all tokens of these heads in memory
constexpr int64_t WEIGHED = 16;  // judging a token by its estimate takes as long as so many products

// Tokens that one thread reads: a bulk's from `start` to `stop`, or with a `scan` those of its list. All of them lie in
// records, or none. The partial attention goes to `part`.
struct Job {
    int64_t head, start, stop, part;
    const Scan* scan;
    bool recorded;
};

// One decode step of some heads, in phases. One thread plans each next phase; all threads of the step compute it.
struct Share {
    const Decode& call;
    const int64_t first_head, head_count;  // this share's, among the KV heads of all rows
    const int threads;
    std::vector<Scan>& pool;  // kept from step to step, as new memory comes page by page, slower than it is used
    Reading* const reading;  // if rows share a bulk, it counts what they read, instead of the byte counters here
    std::vector<float> local_out, local_lse, parts, part_lse;
    std::vector<int64_t> first_part, part_count;  // of each head: local attention, pending tokens, bulk; none if local
    std::vector<int64_t> first_scan;  // [head_count + 1]: index of each head's first scan in `pool`; then their number
    std::vector<uint8_t> needed, selects;  // whether a head reads its bulk, and selects tokens of it
    std::vector<Job> jobs;
    std::vector<Selecting> selecting;
    int64_t scan_count = 0, bulk_read_bytes = 0, sketch_read_bytes = 0;  // bytes for the call's counters

    Share(const Decode& call, int64_t first_head, int64_t head_count, int threads, std::vector<Scan>& pool,
          Reading* reading)
        : call(call), first_head(first_head), head_count(head_count), threads(threads), pool(pool), reading(reading),
          local_out(head_count * SIZE), local_lse(head_count * QUERIES), first_part(head_count), part_count(head_count),
          first_scan(head_count + 1), needed(head_count), selects(head_count),
          selecting(call.codes.data ? head_count : 0) {}

    int64_t row_of(int64_t head) const { return (first_head + head) / call.kv_heads; }
    int64_t kv_head_of(int64_t head) const { return (first_head + head) % call.kv_heads; }
    void decide_head(int64_t head) {
        int64_t row = row_of(head), kv_head = kv_head_of(head);
        float* lse = &local_lse[head * QUERIES];
        needed[head] = decide(call, row, kv_head, &local_out[head * SIZE], lse);
        selects[head] = needed[head] && call.sketched_row(row) && selecting[head].ask(call, row, kv_head, lse);
    }

    // Appends a part for a head, and returns its index. The parts of a head are neighbours.
    int64_t add_part(int64_t head) {
        int64_t part = part_lse.size() / QUERIES;
        if (!part_count[head]++) first_part[head] = part;
        parts.resize((part + 1) * SIZE);
        part_lse.resize((part + 1) * QUERIES);
        return part;
    }
    void add_part(int64_t head, const float* out, const float* lse) {
        int64_t part = add_part(head);
        std::copy(out, out + SIZE, &parts[part * SIZE]);
        std::copy(lse, lse + QUERIES, &part_lse[part * QUERIES]);
    }

    // Adds `splits` jobs, of tokens `start` to `stop` of a head's bulk, or of the list of a `scan`. Bulks in records
    // are split at whole spans.
    void add_jobs(int64_t head, int64_t start, int64_t stop, int64_t splits, bool recorded,
                  const Scan* scan = nullptr) {
        const int64_t unit = recorded && !scan ? SPAN : 1, units = (stop - start) / unit;
        for (int64_t split = 0; split < splits; split++) {
            int64_t first = start + units * split / splits * unit, last = start + units * (split + 1) / splits * unit;
            if (split + 1 == splits) last = stop;
            jobs.push_back({head, first, last, add_part(head), scan, recorded});
        }
        if (!reading) bulk_read_bytes += (stop - start) * (recorded ? RECORD_SIZE : TOKEN_BYTES);
        else reading->note(kv_head_of(head), start, stop, scan ? scan->tokens.data() : nullptr);
    }

    // Plans jobs for heads that read their whole bulk, and scans for heads that select tokens.
    void plan_reading() {
        int64_t flagged = std::count(needed.begin(), needed.end(), 1);
        for (int64_t head = 0; head < head_count; head++) {
            first_scan[head] = scan_count;
            if (!needed[head]) continue;
            int64_t tokens = call.bulk_length(row_of(head)), recorded = call.recorded(row_of(head));
            int64_t splits = count_splits(tokens, flagged, threads, call.split_tokens);
            if (selects[head] || recorded) {
                if (!reading) sketch_read_bytes += call.count_sketch_bytes(tokens);
                else reading->note_sketch(kv_head_of(head));
            }
            if (!selects[head]) {
                add_part(head, &local_out[head * SIZE], &local_lse[head * QUERIES]);
                if (recorded) add_jobs(head, 0, recorded, splits, true);
                add_jobs(head, recorded, tokens, recorded ? 1 : splits, false);
                continue;
            }
            for (int64_t split = 0; split < splits; split++) {
                int64_t start = tokens * split / splits, stop = tokens * (split + 1) / splits;
                if (scan_count == (int64_t)pool.size()) pool.emplace_back();
                Scan& part = pool[scan_count++];
                part.head = head;
                part.start = start / SPAN * SPAN;  // a span lies in one segment
                part.stop = split + 1 < splits ? stop / SPAN * SPAN : stop;
            }
        }
        first_scan[head_count] = scan_count;
    }

    void scan(Scan& part, const float* score_cut) {
        const Selecting& head_selecting = selecting[part.head];
        Estimates estimates = head_selecting.estimates(call, row_of(part.head), kv_head_of(part.head));
        part.run(estimates, head_selecting.log_buffer, score_cut, call.log_share_cut(row_of(part.head)));
    }

    // Keeps those tokens of a scan's list that reach the cut, now that the weight of all tokens of the head is known.
    void apply_cut(Scan& part) {
        const Selecting& head_selecting = selecting[part.head];
        float score_cut[QUERIES], log_share = call.log_share_cut(row_of(part.head));
        bool missed = false;
        for (int q = 0; q < head_selecting.count; q++) {
            float log_all = head_selecting.log_buffer[q];
            for (int64_t i = first_scan[part.head]; i < first_scan[part.head + 1]; i++)
                log_all = log_sum(log_all, pool[i].log_mass(q));
            score_cut[q] = log_all + log_share;
            missed |= head_selecting.score_cut[q] > score_cut[q];
        }
        if (missed) {  // a scan of its own: other threads still read this one's weights
            Scan again{};
            again.head = part.head;
            again.start = part.start;
            again.stop = part.stop;
            scan(again, score_cut);
            part.count = again.count;
            part.tokens.swap(again.tokens);
            std::swap(part.estimates, again.estimates);
            std::copy(again.unread_mass, again.unread_mass + QUERIES, part.unread_mass);
            std::copy(again.lifted, again.lifted + QUERIES, part.lifted);
        }
        part.apply_cut(score_cut, head_selecting.count);
    }

    // Sets the last of a head's first three parts: unread tokens as one token, with weight and value as by
    // `select_tokens` and `estimate_unread` (sketch/selection.py).
    void add_unread(int64_t head) {
        const float* mean = call.mean_value.at(row_of(head), kv_head_of(head));
        const int64_t place = first_part[head] + 2;  // behind local and pending tokens
        float *values = &parts[place * SIZE], *log_unread = &part_lse[place * QUERIES];
        const Scan *begin = &pool[first_scan[head]], *end = begin + first_scan[head + 1] - first_scan[head];
        int asked = 0;  // index of the query among those that read the bulk
        for (int q = 0; q < QUERIES; q++) {
            std::copy(mean, mean + VALUE_DIM, values + q * VALUE_DIM);
            log_unread[q] = -INFINITY;
            if (!call.flags[(first_head + head) * QUERIES + q]) continue;
            double count = 0, sum = 0, squares = 0, lifted = 0;
            for (const Scan* scan = begin; scan < end; scan++) {
                count += scan->stop - scan->start;
                sum += sum_of(scan->sum[asked]);
                squares += sum_of(scan->squares[asked]);
                log_unread[q] = log_sum(log_unread[q], scan->log_unread_mass[asked]);
            }
            for (const Scan* scan = begin; scan < end; scan++)
                if (scan->log_unread_mass[asked] > -INFINITY)
                    lifted += expf(scan->log_unread_mass[asked] - log_unread[q]) * sum_of(scan->lifted[asked]) /
                              sum_of(scan->unread_mass[asked]);
            double variance = squares / count - sum / count * (sum / count);
            const float* along = selecting[head].along + asked * VALUE_DIM;
            if (!(variance <= FLAT) && log_unread[q] > -INFINITY)  // a nan in scores has to show in the output
                for (int v = 0; v < VALUE_DIM; v++)
                    values[q * VALUE_DIM + v] += (lifted - sum / count) / variance * along[v];
            log_unread[q] += call.log_unread_weight;
            asked++;
        }
    }

    void plan_selected() {
        int64_t selected = 0;
        jobs.clear();
        for (int64_t i = 0; i < scan_count; i++) selected += pool[i].count;
        int64_t job_tokens = std::max(call.split_tokens, selected / (SHARES * threads));
        for (int64_t i = 0; i < scan_count; i++) {
            const Scan& part = pool[i];
            const int32_t* tokens = part.tokens.data();
            int64_t head = part.head, recorded = call.recorded(row_of(head));
            if (!part_count[head]) {
                add_part(head, &local_out[head * SIZE], &local_lse[head * QUERIES]);
                add_part(head, selecting[head].pending, selecting[head].pending_lse);
                add_part(head);
            }
            recorded = recorded ? std::lower_bound(tokens, tokens + part.count, recorded) - tokens : 0;
            add_jobs(head, 0, recorded, (recorded + job_tokens - 1) / job_tokens, true, &part);
            add_jobs(head, recorded, part.count, (part.count - recorded + job_tokens - 1) / job_tokens, false, &part);
        }
    }

    int64_t count_tokens() const {
        return std::accumulate(jobs.begin(), jobs.end(), int64_t(0),
                               [](int64_t sum, const Job& job) { return sum + job.stop - job.start; });
    }

    void read(const Job& job) {
        int64_t row = row_of(job.head), kv_head = kv_head_of(job.head), count = job.stop - job.start;
        float *out = &parts[job.part * SIZE], *lse = &part_lse[job.part * QUERIES];
        const int32_t* listed = job.scan ? &job.scan->tokens[job.start] : nullptr;
        // Without records their code is not compiled, as it makes a build a third longer.
        if constexpr (CODED)
            if (job.recorded) {
                auto bulk = attend_to_records(call, selecting[job.head], row, kv_head);
                if (listed) bulk.add_listed(listed, count);
                else bulk.add_spans(job.start, job.stop);
                bulk.finish(out, lse);
                return;
            }
        const int64_t recorded = call.recorded(row), first = job.start - recorded;
        const Element *key = call.bulk_keys.at(row, kv_head), *value = call.bulk_values.at(row, kv_head);
        Attention bulk(call.query + (first_head + job.head) * QUERIES * DIM, call.scaling);
        if (!listed) {
            if (first == 0) call.add_columns(bulk, call.rows.pending.at(row), row, kv_head);
            bulk.add(key + first * DIM, value + first * VALUE_STRIDE, count);
        } else if constexpr (!CODED) {  // with records, all selected tokens lie in records
            bulk.add(key, value, count, IndexedPlaces{listed, count, recorded});
        }
        bulk.finish(out, lse);
    }

    void merge_parts(int64_t head) {
        float merged[VALUE_DIM], lse;
        for (int q = 0; q < QUERIES; q++) {
            const float* output = &local_out[head * SIZE + q * VALUE_DIM];
            const int64_t part = first_part[head], query = (first_head + head) * QUERIES + q;
            if (call.flags[query]) {
                merge(&parts[part * SIZE], &part_lse[part * QUERIES], part_count[head], q, merged, &lse);
                output = merged;
            }
            for (int v = 0; v < VALUE_DIM; v++) call.out[query * VALUE_DIM + v] = to_element(output[v]);
        }
    }

    // Calls `work` with each number below `count`, by all threads unless `products` are too few to wake them. No
    // exception may leave a parallel region: after the first one, the remaining numbers are skipped, and it is thrown
    // behind the region.
    template <typename Work>
    void each(int64_t count, int64_t products, Work work) {
        if (threads == 1 || count <= 1 || products < call.alone) {
            for (int64_t i = 0; i < count; i++) work(i);
            return;
        }
        std::atomic<bool> failed{false};
#pragma omp parallel for num_threads(threads) schedule(dynamic)
        for (int64_t i = 0; i < count; i++) try {
                if (!failed) work(i);
            } catch (...) {
                failed = true;
            }
        if (failed) throw std::bad_alloc();
    }

    // Decides for all heads. Then reads the bulks of those that need them, which takes most of the time, or scans their
    // sketches and reads the selected tokens.
    void run() {
        constexpr int64_t token_products = QUERIES * (DIM + VALUE_DIM);
        each(head_count, head_count * call.rows.columns * token_products, [&](int64_t head) { decide_head(head); });
        plan_reading();
        each(jobs.size(), count_tokens() * token_products, [&](int64_t i) { read(jobs[i]); });
        if (scan_count) {
            int64_t scanned = 0, kept = 0;  // tokens
            for (int64_t i = 0; i < scan_count; i++) scanned += pool[i].stop - pool[i].start;
            each(scan_count, scanned * QUERIES * DIM,
                 [&](int64_t i) { scan(pool[i], selecting[pool[i].head].score_cut); });
            for (int64_t i = 0; i < scan_count; i++) kept += pool[i].count;
            each(scan_count, kept * QUERIES * WEIGHED, [&](int64_t i) { apply_cut(pool[i]); });
            plan_selected();
            for (int64_t head = 0; head < head_count; head++)
                if (selects[head]) add_unread(head);
            each(jobs.size(), count_tokens() * token_products, [&](int64_t i) { read(jobs[i]); });
        }
        for (int64_t head = 0; head < head_count; head++) merge_parts(head);
    }
};

}  // namespace
