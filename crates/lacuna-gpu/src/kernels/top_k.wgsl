// The tokens of a row's largest logits, the largest first, of equal ones the first; zeros are alike. A workgroup sorts a run of
// a row and keeps the first of it; then others sort what some runs have kept, until all that is left of a row is one list.
// What a run keeps lies where its logits were, so each takes at most half as many as a run has. Logits are compared as whole
// numbers that have their order, so the list depends on nothing but them. A logit that is no finite number goes before all others.

struct Params {
    source: u32,  // word of the first row
    to: u32,      // word of the first row's list, when it is the only one left
    width: u32,   // logits of a row
    runs: u32,    // of a row, all about as long
    step: u32,    // runs of a list that is read: a list has what that many runs came to; 0: logits are read
    lists: u32,   // lists that a workgroup reads
    count: u32,   // a list's pairs of a key and a token
    last: u32,    // 1: one list is left of each row
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<u32>;

const THREADS = 128u;
const MOST = 1024u;

// Keys and tokens.
var<workgroup> sorted: array<vec2<u32>, MOST>;

// Where a run begins in its row.
fn start_of(run: u32) -> u32 {
    return run * p.width / p.runs;
}

@compute @workgroup_size(THREADS)
fn top_k(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let row = p.source + group.y * p.width;
    // The first run of what this workgroup has.
    var run = group.x;
    if p.step == 0u {
        let start = start_of(run);
        let length = start_of(run + 1u) - start;
        for (var i = thread; i < MOST; i += THREADS) {
            var pair = vec2<u32>(0u, NONE);
            if i < length {
                pair = vec2<u32>(key_of(arena[row + start + i]), start + i);
            }
            sorted[i] = pair;
        }
    } else {
        run = group.x * p.lists * p.step;
        for (var i = thread; i < MOST; i += THREADS) {
            var pair = vec2<u32>(0u, NONE);
            let list = i / p.count;
            let first = run + list * p.step;
            if list < p.lists && first < p.runs {
                let at = row + start_of(first) + 2u * (i % p.count);
                pair = vec2<u32>(arena[at], arena[at + 1u]);
            }
            sorted[i] = pair;
        }
    }
    workgroupBarrier();
    // A bitonic sort: halves that ascend and descend become one that descends, of two, then of four.
    for (var size = 2u; size <= MOST; size *= 2u) {
        for (var apart = size / 2u; apart > 0u; apart /= 2u) {
            for (var i = thread; i < MOST / 2u; i += THREADS) {
                let low = 2u * i - (i & (apart - 1u));
                let a = sorted[low];
                let b = sorted[low + apart];
                let descends = (low & size) == 0u;
                if comes_first(b, a) == descends {
                    sorted[low] = b;
                    sorted[low + apart] = a;
                }
            }
            workgroupBarrier();
        }
    }
    var to = row + start_of(run);
    if p.last == 1u {
        to = p.to + 2u * p.count * group.y;
    }
    for (var i = thread; i < p.count; i += THREADS) {
        let pair = sorted[i];
        arena[to + 2u * i] = pair.x;
        arena[to + 2u * i + 1u] = pair.y;
    }
}
