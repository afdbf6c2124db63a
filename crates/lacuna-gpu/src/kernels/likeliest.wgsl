// The token of a row's largest logit: of several as large the first, and zeros are alike. First each workgroup finds that of
// one run of a row, then one workgroup that of all runs. Logits are compared as whole numbers that have their order, so the
// token depends on nothing but them. A logit that is no finite number goes before all others: then the row has no token,
// and the first such logit is told.

struct Params {
    source: u32,  // word of the first row: logits, or what runs came to
    to: u32,      // word of what comes of the first row
    width: u32,   // logits, or runs, of a row
    run: u32,     // of which a workgroup has so many
    last: u32,    // 1: what runs came to is read, and a word of each row is left
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<u32>;

const THREADS = 128u;
// Set beside a token whose logit is not finite.
const NO_TOKEN = 0x80000000u;

// A key, and a token.
var<workgroup> found: array<vec2<u32>, THREADS>;

fn better(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return select(b, a, comes_first(a, b));
}

@compute @workgroup_size(THREADS)
fn likeliest(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let row = group.y * p.width;
    let start = group.x * p.run;
    let end = min(start + p.run, p.width);
    var best = vec2<u32>(0u, NONE);
    for (var i = start + thread; i < end; i += THREADS) {
        if p.last == 1u {
            let at = p.source + 2u * (row + i);
            best = better(best, vec2<u32>(arena[at], arena[at + 1u]));
        } else {
            best = better(best, vec2<u32>(key_of(arena[p.source + row + i]), i));
        }
    }
    found[thread] = best;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if thread < half {
            found[thread] = better(found[thread], found[thread + half]);
        }
        workgroupBarrier();
    }
    if thread != 0u {
        return;
    }
    let of_all = found[0];
    if p.last == 1u {
        arena[p.to + group.y] = of_all.y | select(0u, NO_TOKEN, of_all.x == NOT_FINITE);
    } else {
        let at = p.to + 2u * (group.y * groups.x + group.x);
        arena[at] = of_all.x;
        arena[at + 1u] = of_all.y;
    }
}
