// Attention for few tokens: up to four query rows to a workgroup, which share the reading of keys and values.
//
// A score is the sum of its splits' sums, of values that of its runs' sums, each one after the other; so all threads have
// their part of a partition.

const THREADS = 256u;
// Query rows to a workgroup.
const ROWS = 4u;
// The longest head there is, and an element more for each of at most eight splits.
const MOST = 584u;
const MOST_SPLITS = 8u;
// Where partial scores begin, behind the queries; those of a row, and one more, so that rows lie in different banks.
const SCORES = MOST;
const SCORES_OF_ROW = MOST_SPLITS + 1u;
// Elements of values that are computed at a time, and threads for them: eight elements each.
const VALUES = 128u;
const ACROSS = VALUES / 8u;

// An element of each of the four query rows, with one left out behind each split so that splits lie in different banks; and
// partial scores of the four. Then, sums of values of runs.
var<workgroup> space: array<vec4<f32>, 1160>;
// Scores of the rows of the partition for each of the four, then their weights.
var<workgroup> weights: array<vec4<f32>, PARTITION>;
// The largest scores, then the sums of weights, of quarters of the rows.
var<workgroup> quarters: array<f32, 16>;

@compute @workgroup_size(THREADS)
fn attend(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) place: vec3<u32>,
) {
    let head = place.x;
    let part = p.first_partition + place.y;
    let first = place.z * ROWS;
    let end = min(first + ROWS, p.tokens * p.group);
    let seen = seen_of(part, first, end);
    if seen.x >= seen.y {
        return;
    }
    let start = part * PARTITION;
    // Of a last group that is not full, the last query row again.
    let query_rows = min(vec4<u32>(first) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(end - 1u));
    let queries = vec4<u32>(
        query_of(query_rows.x, head),
        query_of(query_rows.y, head),
        query_of(query_rows.z, head),
        query_of(query_rows.w, head),
    );
    for (var i = thread; i < p.key_dim; i += THREADS) {
        space[i + i / p.split] = vec4<f32>(
            arena[queries.x + i],
            arena[queries.y + i],
            arena[queries.z + i],
            arena[queries.w + i],
        );
    }
    workgroupBarrier();
    make_ready(thread);

    let splits = (p.key_dim + p.split - 1u) / p.split;
    for (var i = thread; i < PARTITION * splits; i += THREADS) {
        let row = i / splits;
        let split = i % splits;
        // Rows that nobody sees are others again.
        let nearest = clamp(start + row, seen.x, seen.y - 1u);
        space[SCORES + row * SCORES_OF_ROW + split] = scores_of(nearest, head, split);
    }
    workgroupBarrier();
    if thread < PARTITION {
        var sums = vec4<f32>();
        for (var split = 0u; split < splits; split++) {
            sums += space[SCORES + thread * SCORES_OF_ROW + split];
        }
        for (var i = 0u; i < ROWS; i++) {
            let visible = sees(query_rows[i], start + thread);
            sums[i] = select(LOWEST, capped(sums[i] * p.scale), visible);
        }
        weights[thread] = sums;
    }
    workgroupBarrier();
    // Sixteen threads, each with a query row and a quarter of the rows.
    if thread < 4u * ROWS {
        let quarter = thread / ROWS * (PARTITION / 4u);
        var largest = LOWEST;
        for (var i = 0u; i < PARTITION / 4u; i++) {
            largest = max(largest, weights[quarter + i][thread % ROWS]);
        }
        quarters[thread] = largest;
    }
    workgroupBarrier();
    var largest = vec4<f32>(LOWEST);
    for (var i = 0u; i < 4u; i++) {
        let quarter = vec4<f32>(
            quarters[i * ROWS],
            quarters[i * ROWS + 1u],
            quarters[i * ROWS + 2u],
            quarters[i * ROWS + 3u],
        );
        largest = max(largest, quarter);
    }
    if thread < PARTITION {
        let scores = weights[thread];
        weights[thread] = select(exp(scores - largest), vec4<f32>(), scores == vec4<f32>(LOWEST));
    }
    workgroupBarrier();
    if thread < 4u * ROWS {
        let quarter = thread / ROWS * (PARTITION / 4u);
        var sum = 0.0;
        for (var i = 0u; i < PARTITION / 4u; i++) {
            sum += weights[quarter + i][thread % ROWS];
        }
        quarters[thread] = sum;
    }

    // Two of the four query rows, a run of the rows, and eight elements, for each thread.
    let across = thread % ACROSS;
    let run = thread / ACROSS % RUNS;
    let pair = thread / (ACROSS * RUNS) * 2u;
    for (var element = 0u; element < p.value_dim; element += VALUES) {
        let own = element + across * 8u;
        var one = Eight();
        var other = Eight();
        if own < p.value_dim {
            for (var i = 0u; i < RUN; i++) {
                let row = run * RUN + i;
                // What nobody sees weighs nothing.
                let values = values_of(clamp(start + row, seen.x, seen.y - 1u), head, own);
                let both = weights[row];
                let one_weight = vec4<f32>(both[pair]);
                let other_weight = vec4<f32>(both[pair + 1u]);
                one.low = fma(one_weight, values.low, one.low);
                one.high = fma(one_weight, values.high, one.high);
                other.low = fma(other_weight, values.low, other.low);
                other.high = fma(other_weight, values.high, other.high);
            }
        }
        let at = ((pair * RUNS + run) * ACROSS + across) * 2u;
        space[at] = one.low;
        space[at + 1u] = one.high;
        space[at + 2u * RUNS * ACROSS] = other.low;
        space[at + 2u * RUNS * ACROSS + 1u] = other.high;
        workgroupBarrier();
        // Four elements of a query row for each thread.
        let four = element + thread % (2u * ACROSS) * 4u;
        let query_row = first + thread / (2u * ACROSS);
        if thread < ROWS * 2u * ACROSS && query_row < end && four < p.value_dim {
            var sum = vec4<f32>();
            for (var i = 0u; i < RUNS; i++) {
                sum += space[(thread / (2u * ACROSS) * RUNS + i) * 2u * ACROSS + thread % (2u * ACROSS)];
            }
            let to = state_of(query_row, head, part) + 2u + four;
            for (var i = 0u; i < min(p.value_dim - four, 4u); i++) {
                arena[to + i] = sum[i];
            }
        }
        workgroupBarrier();
    }
    if thread < end - first {
        let state = state_of(first + thread, head, part);
        arena[state] = largest[thread];
        arena[state + 1u] = (quarters[thread] + quarters[thread + ROWS])
            + (quarters[thread + 2u * ROWS] + quarters[thread + 3u * ROWS]);
    }
}
