// The arguments of `fused_decode`, and its first half: local attention, which heads need the long context, and what
// they ask of it by a sketch.

#pragma once

#include "coded.h"
#include "moments.h"

namespace {

enum GroupRule { HEAD, ANY };

// `Rows`, `Query` and `Operands` of operands.py, which say what shapes these have; compiled_decode.py has the same
// fields.
struct Rows {
    View<const uint8_t> local, pending, decided;
    View<const int64_t> bulk_lengths;
    int64_t columns;
};

struct Decode {
    const Element* query;
    const Element *new_keys, *new_values;  // of each row's token, to be stored first; null where they are stored
    Element* out;
    uint8_t* flags;
    Rows rows;
    View<Element> near_keys, near_values;
    View<const Element> bulk_keys, bulk_values;
    View<const float> log_bulk;  // of each query of a head; null where it is the larger estimate by these
    Moments moments[2];          // null where there are fewer
    // Fields of `Sketch`, with shapes as in `list_fields` (sketch/codec.py); null without a sketch. Those of 16 bits
    // are bfloat16.
    View<const uint32_t> codes;
    View<const uint8_t> scales;
    View<const int8_t> slopes;  // of two channels a byte
    View<const float> units, noise, variances, mean_value, slope_units;
    View<const uint16_t> centres, weights;
    View<const Channel> order;
    const float* errors;  // [DIM] of `Layout`, times half the squared scaling
    const float* sink_logits;  // of each query head: one more score, of a token whose value is zero; may be null
    // Of closed segments, and of the tokens that follow: bulk keys and values are then of rows without a sketch.
    View<const uint8_t> records, open_records;
    View<const float> record_weights;  // [DIM], `m` of sketch/coded.py
    int64_t *bulk_read_bytes, *sketch_read_bytes;  // may be null
    int64_t batch, kv_heads, split_tokens;
    int64_t min_sketched;  // a bulk of fewer tokens is read whole
    int64_t segment_tokens, last_tokens;  // of a segment, and of the last one at least
    int64_t alone;  // products of a phase that one thread has summed before another wakes
    int64_t sketch_bytes[3];  // of a token, of a segment, and once
    float scaling, logit_threshold;  // `log A_local - log A_bulk` below which a head is long-context
    float log_token_threshold, log_unread_weight;
    float unreliable, noise_share;  // see `unreliable` of selection.py
    int group_rule, threads;
    int selects;  // whether heads select tokens by the sketch
    Words words;

    int64_t bulk_length(int64_t row) const { return *rows.bulk_lengths.at(row); }
    int64_t count_bulk_tokens(int64_t row) const {
        const uint8_t* mask = rows.pending.at(row);
        return bulk_length(row) + std::count(mask, mask + rows.columns, 1);
    }
    // Of a bulk of so many tokens; see sketch/__init__.py.
    int64_t count_segments(int64_t tokens) const {
        return std::max<int64_t>(1, (tokens + segment_tokens - last_tokens) / segment_tokens);
    }
    bool sketched_row(int64_t row) const { return codes.data && bulk_length(row) >= min_sketched; }
    // How many of a bulk's tokens lie in records, all or none; and where these are.
    int64_t recorded(int64_t row) const { return CODED && sketched_row(row) ? bulk_length(row) : 0; }
    RecordPlaces record_places(int64_t row, int64_t head) const {
        const int64_t closed = (count_segments(bulk_length(row)) - 1) * segment_tokens;
        return {records.at(row, head), open_records.at(row, head), closed};
    }
    // What reading so many tokens of a sketch takes.
    int64_t count_sketch_bytes(int64_t tokens) const {
        return tokens * sketch_bytes[0] + count_segments(tokens) * sketch_bytes[1] + sketch_bytes[2];
    }
    // How much a token must weigh of a query's attention to be read.
    float log_share_cut(int64_t row) const { return log_token_threshold - logf((float)count_bulk_tokens(row)); }

    // Puts the token's key and value into the newest column, unless they are there.
    void store_new(int64_t row, int64_t head) const {
        if (!new_keys) return;
        const int64_t index = row * kv_heads + head, column = rows.columns - 1;
        std::copy_n(new_keys + index * DIM, DIM, near_keys.at(row, head) + column * DIM);
        if (VALUES_IN_KEYS) return;
        std::copy_n(new_values + index * VALUE_DIM, VALUE_DIM, near_values.at(row, head) + column * VALUE_DIM);
    }

    // `log A_bulk` of each query of a KV head. Of two estimates a number comes before a nan.
    void find_log_bulk(int64_t row, int64_t head, float* found) const {
        if (log_bulk.data) {
            std::copy_n(log_bulk.at(row, head), QUERIES, found);
            return;
        }
        std::fill_n(found, QUERIES, NAN);
        for (const Moments& each : moments)
            if (each.mean.data)
                each.estimate(query + (row * kv_heads + head) * QUERIES * DIM, row, head, scaling, found);
    }

    // Adds a head's learned sinks to its local attention.
    void add_sinks(int64_t head, float* out, float* lse) const {
        if (!sink_logits) return;
        for (int q = 0; q < QUERIES; q++) {
            const float sink = sink_logits[head * QUERIES + q], total = log_sum(lse[q], sink);
            const float share = sink == -INFINITY ? 1.0f : expf(lse[q] - total);
            for (int d = 0; d < VALUE_DIM; d++) out[q * VALUE_DIM + d] *= share;
            lse[q] = total;
        }
    }

    // Adds the local columns where `mask` is set, run by run.
    void add_columns(Attention& partial, const uint8_t* mask, int64_t row, int64_t head) const {
        for (int64_t start = 0, stop; start < rows.columns; start = stop + 1) {
            for (stop = start; stop < rows.columns && mask[stop];) stop++;
            partial.add(near_keys.at(row, head) + start * DIM, near_values.at(row, head) + start * VALUE_STRIDE,
                        stop - start);
        }
    }
};

constexpr int64_t TOKEN_BYTES = (DIM + (VALUES_IN_KEYS ? 0 : VALUE_DIM)) * (int64_t)sizeof(Element);

// What is read of a bulk that all rows of a call share, as the tokens of one row's call do: what several of them read
// counts once.
struct Reading {
    const Decode& call;
    const int64_t tokens;
    std::vector<uint8_t> seen;  // of each KV head, whether its sketch was read, and each of its tokens

    explicit Reading(const Decode& call)
        : call(call), tokens(call.bulk_length(0)), seen(call.kv_heads * (1 + tokens)) {}

    // Threads write the same.
    void mark(int64_t place) { __atomic_store_n(&seen[place], 1, __ATOMIC_RELAXED); }
    void note_sketch(int64_t head) { mark(head * (1 + tokens)); }
    void note(int64_t head, int64_t start, int64_t stop, const int32_t* listed) {
        for (int64_t i = start; i < stop; i++) mark(head * (1 + tokens) + 1 + (listed ? listed[i] : i));
    }
    void add_to(int64_t& bulk_read_bytes, int64_t& sketch_read_bytes) const {
        const int64_t recorded = call.recorded(0);
        for (int64_t head = 0; head < call.kv_heads; head++) {
            const uint8_t *sketch = &seen[head * (1 + tokens)], *first = sketch + 1;
            if (*sketch) sketch_read_bytes += call.count_sketch_bytes(tokens);
            bulk_read_bytes += std::count(first, first + recorded, 1) * RECORD_SIZE;
            bulk_read_bytes += std::count(first + recorded, first + tokens, 1) * TOKEN_BYTES;
        }
    }
};

// The copy of `criterion.find_long_context`.
bool needs_long_context(float local, float bulk, float logit_threshold) {
    return local - (std::isnan(bulk) ? INFINITY : bulk) < logit_threshold;
}

// Computes local attention of one KV head and flags its queries that need the long context; returns whether any does.
inline bool decide(const Decode& call, int64_t row, int64_t head, float* out, float* lse) {
    int64_t index = row * call.kv_heads + head;
    uint8_t* flags = call.flags + index * QUERIES;
    call.store_new(row, head);
    Attention local(call.query + index * QUERIES * DIM, call.scaling);
    call.add_columns(local, call.rows.local.at(row), row, head);
    local.finish(out, lse);
    call.add_sinks(head, out, lse);

    float log_bulk[QUERIES];
    bool decided = *call.rows.decided.at(row) && call.count_bulk_tokens(row) > 0, any = false;
    if (decided) call.find_log_bulk(row, head, log_bulk);
    for (int q = 0; q < QUERIES; q++) {
        flags[q] = decided && needs_long_context(lse[q], log_bulk[q], call.logit_threshold);
        any = any || flags[q];
    }
    if (call.group_rule == ANY) std::fill(flags, flags + QUERIES, any);
    return any;
}

// The flagged queries of a KV head with a sketch, prepared for selecting tokens.
struct Selecting {
    int count, asking[QUERIES];  // flagged query number `i` is query `asking[i]` of the head
    int64_t segment_count;
    std::unique_ptr<Rounded[]> segments;
    float log_buffer[QUERIES], score_cut[QUERIES];  // log A_buffer; least score of a selected token, by a sample
    float most[SLOTS];  // what the expected effect of a score's error counts at most
    float along[SIZE];  // [count, VALUE_DIM], scaling * Cov(v, k) q
    float pending[SIZE], pending_lse[QUERIES];  // attention over pending tokens
    Turned turned;  // the queries for records, if there are any

    // Prepares a flagged head; `lse` [QUERIES] is of its local attention. False if its whole bulk is to be read, as
    // estimates of a query are unreliable.
    bool ask(const Decode& call, int64_t row, int64_t head, const float* lse) {
        Slots queries[DIM] = {};
        const bool selects = take_queries(call, row, head, queries) && call.selects;
        if (selects || SCORED) round_queries(call, row, head, queries);
        if (!selects) return false;
        find_slopes(call, row, head, queries);
        int64_t first = (row * call.kv_heads + head) * QUERIES;
        Attention beyond(call.query + first * DIM, call.scaling);
        call.add_columns(beyond, call.rows.pending.at(row), row, head);
        beyond.finish(pending, pending_lse);
        for (int q = 0, active = 0; q < QUERIES; q++)
            if (call.flags[first + q]) log_buffer[active++] = log_sum(lse[q], pending_lse[q]);
        Estimates found = estimates(call, row, head);
        found.sample_log_mass(call.bulk_length(row), score_cut);
        for (int q = 0; q < found.count; q++)
            score_cut[q] = log_sum(log_buffer[q], score_cut[q]) + call.log_share_cut(row) - ROUNDING;
        return true;
    }

    Estimates estimates(const Decode& call, int64_t row, int64_t head) const {
        return {count,
                segments.get(),
                segment_count,
                call.segment_tokens,
                call.codes.at(row, head),
                call.codes.head_stride / call.words.count(),
                call.words,
                call.scales.at(row, head)};
    }

    // Copies the flagged queries; returns whether estimates of all of them are reliable.
    bool take_queries(const Decode& call, int64_t row, int64_t head, Slots* queries) {
        int64_t first = (row * call.kv_heads + head) * QUERIES;
        bool reliable = true;
        count = 0;
        for (int q = 0; q < QUERIES; q++) {
            if (!call.flags[first + q]) continue;
            alignas(CACHE_LINE) float query[DIM];
            float noise = 0, variance = 0;
            for (int d = 0; d < DIM; d++) query[d] = widen(call.query[(first + q) * DIM + d]);
            for (int d = 0; d < DIM; d++) {
                noise += query[d] * query[d] * call.noise.at(row, head)[d];
                variance += query[d] * query[d] * call.variances.at(row, head)[d];
            }
            float half_variance = 0.5f * call.scaling * call.scaling * noise;
            most[count] = std::max((float)MOST_HALF, (float)MOST_RISE * half_variance);
            bool hopeful = half_variance <= (float)HOPELESS * call.unreliable;  // false for NaN
            bool small = half_variance <= call.unreliable;
            if (!small && !(noise <= call.noise_share * variance && hopeful)) reliable = false;
            for (int d = 0; d < DIM; d++) queries[d][count] = query[d];
            asking[count++] = q;
        }
        return reliable;
    }

    // Computes `along`: how the expected value follows a query's scores.
    void find_slopes(const Decode& call, int64_t row, int64_t head, const Slots* queries) {
        alignas(CACHE_LINE) float lifting[QUERIES][DIM];
        for (int d = 0; d < DIM; d++)
            for (int q = 0; q < count; q++)
                lifting[q][d] = call.scaling * queries[d][q] * call.slope_units.at(row, head)[d];
        for (int v = 0; v < VALUE_DIM; v += 4) {
            alignas(CACHE_LINE) float slopes[4 * DIM];
            const int8_t* pairs = call.slopes.at(row, head) + v * (DIM / 2);
            for (int i = 0; i < 4; i++)
                for (int d = 0; d < DIM / 2; d++) {
                    const int8_t pair = pairs[i * (DIM / 2) + d];
                    slopes[i * DIM + d] = (int8_t)((uint8_t)pair << 4) >> 4;
                    slopes[i * DIM + DIM / 2 + d] = pair >> 4;
                }
            for (int q = 0; q < count; q++) {
                Floats products[4] = {};
                for (int c = 0; c < DIM; c += WIDTH)
                    for (int i = 0; i < 4; i++)
                        products[i] += loaded<Floats>(&slopes[i * DIM + c]) * loaded<Floats>(&lifting[q][c]);
                sum_of_each(products, along + q * VALUE_DIM + v);
            }
        }
    }

    // Rounds the queries for each segment, and rotates them for records.
    void round_queries(const Decode& call, int64_t row, int64_t head, const Slots* queries) {
        segment_count = call.count_segments(call.bulk_length(row));
        segments.reset(new Rounded[segment_count]);
        estimates(call, row, head).prefetch_sample(call.bulk_length(row));  // arrives while queries are rounded
        const Segments own{segment_count,
                           call.centres.at(row, head),
                           call.order.at(row, head),
                           call.weights.at(row, head),
                           call.units.at(row, head),
                           call.errors};
        for (int64_t s = 0; s < segment_count; s += TOGETHER)
            own.round(queries, s, call.words, call.scaling, loaded<Slots>(most), segments.get());
        if (SCORED) turned.turn(queries, call.record_weights.at(row, head), call.scaling);
    }
};

}  // namespace
