// Choices sorted by expert, and what workgroups of products have of them: up to `size` choices of one expert each. One
// workgroup counts, adds up and deals out. In which order choices of one expert come is left open: what is computed of
// one does not depend on it.

struct Params {
    choices: u32,  // word of the first choice's expert
    count: u32,    // choices of all tokens
    experts: u32,
    tiles: u32,    // word of what workgroups have: expert, first place, how many, and nothing
    most: u32,     // workgroups
    size: u32,
    order: u32,    // word of the first choice, by expert
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<u32>;

const THREADS = 256u;
// The most experts that there may be.
const MOST = 1024u;

// Choices of each expert, and then where the next of them goes.
var<workgroup> next: array<atomic<u32>, MOST>;
// Choices and workgroups of the experts up to a thread's last.
var<workgroup> sums: array<vec2<u32>, THREADS>;

fn workgroups(choices: u32) -> u32 {
    return (choices + p.size - 1u) / p.size;
}

@compute @workgroup_size(THREADS)
fn bands(@builtin(local_invocation_index) thread: u32) {
    for (var i = thread; i < p.experts; i += THREADS) {
        atomicStore(&next[i], 0u);
    }
    workgroupBarrier();
    for (var i = thread; i < p.count; i += THREADS) {
        atomicAdd(&next[arena[p.choices + i]], 1u);
    }
    workgroupBarrier();
    // Each thread has some neighbours.
    let share = (p.experts + THREADS - 1u) / THREADS;
    let first = min(thread * share, p.experts);
    let end = min(first + share, p.experts);
    var own = vec2<u32>();
    for (var i = first; i < end; i++) {
        let choices = atomicLoad(&next[i]);
        own += vec2<u32>(choices, workgroups(choices));
    }
    sums[thread] = own;
    workgroupBarrier();
    for (var reach = 1u; reach < THREADS; reach *= 2u) {
        var before = vec2<u32>();
        if thread >= reach {
            before = sums[thread - reach];
        }
        workgroupBarrier();
        sums[thread] += before;
        workgroupBarrier();
    }
    var at = sums[thread] - own;
    for (var i = first; i < end; i++) {
        let choices = atomicLoad(&next[i]);
        for (var done = 0u; done < choices; done += p.size) {
            let tile = p.tiles + 4u * at.y;
            arena[tile] = i;
            arena[tile + 1u] = at.x + done;
            arena[tile + 2u] = min(choices - done, p.size);
            at.y += 1u;
        }
        atomicStore(&next[i], at.x);
        at.x += choices;
    }
    for (var i = sums[THREADS - 1u].y + thread; i < p.most; i += THREADS) {
        arena[p.tiles + 4u * i + 2u] = 0u;
    }
    workgroupBarrier();
    for (var i = thread; i < p.count; i += THREADS) {
        let place = atomicAdd(&next[arena[p.choices + i]], 1u);
        arena[p.order + place] = i;
    }
}
