// Attention for many tokens: 64 query rows and the 64 rows of a partition to a workgroup, four of each to a thread, then four
// query rows and eight elements of values. Sums are made in the order of `attend.wgsl`. Where there are many workgroups, each
// has all partitions of its query rows and merges them as `merge` does.

const THREADS = 256u;
// Query rows to a workgroup.
const ROWS = 64u;
// Elements of queries and keys that are in shared memory at a time, in vectors of four; and those of a row, with one more so
// that rows lie in different banks.
const STAGE = 8u;
const STAGED_ROW = STAGE + 1u;
const KEYS = ROWS * STAGED_ROW;
// Weights by row, four query rows to a vector, with one more as well; values behind them.
const WEIGHTS_OF_ROW = ROWS / 4u + 1u;
const VALUES = PARTITION * WEIGHTS_OF_ROW;
// Elements of values that are computed at a time, in vectors of four.
const ACROSS = 32u;

// Queries and keys, then weights and values.
var<workgroup> space: array<vec4<f32>, 1344>;
// The largest score of each query row in each quarter of the rows, then the sums of weights.
var<workgroup> quarters: array<f32, 256>;

// Sums of four query rows, each with four rows.
struct Square {
    a: vec4<f32>,
    b: vec4<f32>,
    c: vec4<f32>,
    d: vec4<f32>,
}


// The sum of the products of two vectors behind `sum`, one after the other.
fn chain(sum: f32, a: vec4<f32>, b: vec4<f32>) -> f32 {
    return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}

fn chains(sums: vec4<f32>, query: vec4<f32>, four: Square) -> vec4<f32> {
    return vec4<f32>(
        chain(sums.x, query, four.a),
        chain(sums.y, query, four.b),
        chain(sums.z, query, four.c),
        chain(sums.w, query, four.d),
    );
}

fn plus(one: Square, other: Square) -> Square {
    return Square(one.a + other.a, one.b + other.b, one.c + other.c, one.d + other.d);
}

// With `value` as heavy as each query row says.
fn weighed(sums: Square, value: vec4<f32>, by: vec4<f32>) -> Square {
    return Square(
        fma(vec4<f32>(by.x), value, sums.a),
        fma(vec4<f32>(by.y), value, sums.b),
        fma(vec4<f32>(by.z), value, sums.c),
        fma(vec4<f32>(by.w), value, sums.d),
    );
}

// Sums of four query rows and those of the partitions before.
fn joined(before: Square, next: Square, kept: vec4<f32>, gained: vec4<f32>) -> Square {
    return Square(
        fma(before.a, vec4<f32>(kept.x), next.a * gained.x),
        fma(before.b, vec4<f32>(kept.y), next.b * gained.y),
        fma(before.c, vec4<f32>(kept.z), next.c * gained.z),
        fma(before.d, vec4<f32>(kept.w), next.d * gained.w),
    );
}

// The word of a query row's state: that of the partition, or the only one.
fn slot_of(query_row: u32, head: u32, part: u32) -> u32 {
    return state_of(query_row, head, select(part, p.base_partition, p.merged != 0u));
}

fn leave(query_row: u32, end: u32, head: u32, part: u32, element: u32, sums: vec4<f32>) {
    if query_row >= end || element >= p.value_dim {
        return;
    }
    let to = slot_of(query_row, head, part) + 2u + element;
    for (var i = 0u; i < min(p.value_dim - element, 4u); i++) {
        arena[to + i] = sums[i];
    }
}

fn leave_four(query_row: u32, end: u32, head: u32, part: u32, element: u32, sums: Square) {
    leave(query_row, end, head, part, element, sums.a);
    leave(query_row + 1u, end, head, part, element, sums.b);
    leave(query_row + 2u, end, head, part, element, sums.c);
    leave(query_row + 3u, end, head, part, element, sums.d);
}

@compute @workgroup_size(THREADS)
fn attend_tile(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) place: vec3<u32>,
) {
    let head = place.x;
    let first = place.z * ROWS;
    let end = min(first + ROWS, p.tokens * p.group);
    var part = p.first_partition + place.y;
    var last_part = part;
    if p.merged != 0u {
        let position = first_position();
        part = first_row(position + first / p.group) / PARTITION;
        last_part = (seen_to(position + (end - 1u) / p.group) - 1u) / PARTITION;
    }
    // Each thread has four query rows beside each other, and every sixteenth row.
    let query_rows = thread / 16u * 4u;
    let rows = thread % 16u;

    // What this thread brings: eight elements of a row of keys, and of a query row. Beyond the last, the last again.
    let brought = thread / 4u;
    let brought_eight = thread % 4u * 2u;
    let query = query_of(min(first + brought, end - 1u), head);
    // What was made of the partitions so far.
    let own = thread % ROWS;
    let quarter = thread / ROWS * (PARTITION / 4u);
    var all_largest = LOWEST;
    var all_sum = 0.0;
    var near_all = Square();
    var far_all = Square();
    for (; part <= last_part; part++) {
        let seen = seen_of(part, first, end);
        if seen.x >= seen.y {
            continue;
        }
        let start = part * PARTITION;
        let key_row = clamp(start + brought, seen.x, seen.y - 1u);
        var all = Square();
        var sums = Square();
        var left = p.split / 4u;
        for (var stage = 0u; stage < p.key_dim; stage += 4u * STAGE) {
            let element = stage + 4u * brought_eight;
            let at = brought * STAGED_ROW + brought_eight;
            if element < p.key_dim {
                let key = keys_of(key_row, head, element);
                space[KEYS + at] = key.low;
                space[KEYS + at + 1u] = key.high;
                let word = query + element;
                space[at] = vec4<f32>(arena[word], arena[word + 1u], arena[word + 2u], arena[word + 3u]);
                if element + 4u < p.key_dim {
                    space[at + 1u] =
                        vec4<f32>(arena[word + 4u], arena[word + 5u], arena[word + 6u], arena[word + 7u]);
                }
            }
            workgroupBarrier();
            let count = min(STAGE, (p.key_dim - stage) / 4u);
            for (var i = 0u; i < count; i++) {
                let key = KEYS + rows * STAGED_ROW + i;
                let four = Square(
                    space[key],
                    space[key + 16u * STAGED_ROW],
                    space[key + 32u * STAGED_ROW],
                    space[key + 48u * STAGED_ROW],
                );
                let queries = query_rows * STAGED_ROW + i;
                sums.a = chains(sums.a, space[queries], four);
                sums.b = chains(sums.b, space[queries + STAGED_ROW], four);
                sums.c = chains(sums.c, space[queries + 2u * STAGED_ROW], four);
                sums.d = chains(sums.d, space[queries + 3u * STAGED_ROW], four);
                left -= 1u;
                if left == 0u {
                    all = plus(all, sums);
                    sums = Square();
                    left = p.split / 4u;
                }
            }
            workgroupBarrier();
        }
        // The last split may be short.
        if left < p.split / 4u {
            all = plus(all, sums);
        }
        // By row now, four query rows together.
        for (var i = 0u; i < 4u; i++) {
            let row = rows + 16u * i;
            let scores = vec4<f32>(all.a[i], all.b[i], all.c[i], all.d[i]);
            var masked = vec4<f32>(LOWEST);
            for (var own = 0u; own < 4u; own++) {
                if sees(min(first + query_rows + own, end - 1u), start + row) {
                    masked[own] = capped(scores[own] * p.scale);
                }
            }
            space[row * WEIGHTS_OF_ROW + query_rows / 4u] = masked;
        }
        workgroupBarrier();

        // A query row and a quarter of the rows for each thread.
        var largest = LOWEST;
        for (var i = 0u; i < PARTITION / 4u; i++) {
            largest = max(largest, space[(quarter + i) * WEIGHTS_OF_ROW + own / 4u][own % 4u]);
        }
        quarters[thread] = largest;
        workgroupBarrier();
        largest = max(
            max(quarters[own], quarters[own + ROWS]),
            max(quarters[own + 2u * ROWS], quarters[own + 3u * ROWS]),
        );
        workgroupBarrier();
        var sum = 0.0;
        for (var i = 0u; i < PARTITION / 4u; i++) {
            let at = (quarter + i) * WEIGHTS_OF_ROW + own / 4u;
            let score = space[at][own % 4u];
            let weight = select(exp(score - largest), 0.0, score == LOWEST);
            space[at][own % 4u] = weight;
            sum += weight;
        }
        quarters[thread] = sum;
        workgroupBarrier();
        // What is kept of the partitions before, and gained by this one, which a query row may see nothing of.
        var kept = 1.0;
        var gained = 0.0;
        if largest > LOWEST {
            let both = max(all_largest, largest);
            kept = exp(all_largest - both);
            gained = exp(largest - both);
            let all_quarters = (quarters[own] + quarters[own + ROWS])
                + (quarters[own + 2u * ROWS] + quarters[own + 3u * ROWS]);
            all_sum = fma(all_sum, kept, all_quarters * gained);
            all_largest = both;
        }
        workgroupBarrier();
        if thread < ROWS {
            quarters[own] = kept;
            quarters[own + ROWS] = gained;
        }
        workgroupBarrier();
        let keep = vec4<f32>(
            quarters[query_rows],
            quarters[query_rows + 1u],
            quarters[query_rows + 2u],
            quarters[query_rows + 3u],
        );
        let gain = vec4<f32>(
            quarters[query_rows + ROWS],
            quarters[query_rows + ROWS + 1u],
            quarters[query_rows + ROWS + 2u],
            quarters[query_rows + ROWS + 3u],
        );

        // Eight elements of a row of values of a run, for the first half of the threads.
        let value_row = thread / 16u;
        let value_eight = thread % 16u * 2u;
        for (var element = 0u; element < p.value_dim; element += 4u * ACROSS) {
            var near = Square();
            var far = Square();
            let from_element = element + 4u * value_eight;
            let brings = value_row < RUN && from_element < p.value_dim;
            // What this thread brings is asked for while the run before it is added.
            var ahead = Eight();
            if brings {
                ahead = values_of(clamp(start + value_row, seen.x, seen.y - 1u), head, from_element);
            }
            for (var run = 0u; run < RUNS; run++) {
                if brings {
                    let at = VALUES + value_row * ACROSS + value_eight;
                    space[at] = ahead.low;
                    space[at + 1u] = ahead.high;
                }
                workgroupBarrier();
                if brings && run + 1u < RUNS {
                    let row = clamp(start + (run + 1u) * RUN + value_row, seen.x, seen.y - 1u);
                    ahead = values_of(row, head, from_element);
                }
                var near_run = Square();
                var far_run = Square();
                for (var i = 0u; i < RUN; i++) {
                    let by = space[(run * RUN + i) * WEIGHTS_OF_ROW + query_rows / 4u];
                    let at = VALUES + i * ACROSS + rows;
                    near_run = weighed(near_run, space[at], by);
                    far_run = weighed(far_run, space[at + 16u], by);
                }
                near = plus(near, near_run);
                far = plus(far, far_run);
                workgroupBarrier();
            }
            near_all = joined(near_all, near, keep, gain);
            far_all = joined(far_all, far, keep, gain);
            if part == last_part {
                leave_four(first + query_rows, end, head, part, element + 4u * rows, near_all);
                leave_four(first + query_rows, end, head, part, element + 4u * rows + 64u, far_all);
                near_all = Square();
                far_all = Square();
            }
        }
    }
    // Query rows that see nothing leave what nobody reads.
    if thread < end - first {
        let state = slot_of(first + thread, head, last_part);
        arena[state] = all_largest;
        arena[state + 1u] = all_sum;
    }
}
