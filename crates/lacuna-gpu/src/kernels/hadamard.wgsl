// Orthonormal Hadamard transforms of blocks, in place: what a block has in few elements is spread over all of it. Blocks are
// powers of two, and a workgroup has as many as 512 elements are. Elements are added in pairs 1 apart, then 2, 4 and so on.

struct Params {
    values: u32,  // word of the first element
    block: u32,   // elements of a block
    count: u32,   // elements of all
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<f32>;

const THREADS = 128u;
const ELEMENTS = 512u;

var<workgroup> all: array<f32, ELEMENTS>;

@compute @workgroup_size(THREADS)
fn hadamard(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let first = (group.y * groups.x + group.x) * ELEMENTS;
    for (var i = thread; i < ELEMENTS; i += THREADS) {
        var x = 0.0;
        if first + i < p.count {
            x = arena[p.values + first + i];
        }
        all[i] = x;
    }
    workgroupBarrier();
    for (var apart = 1u; apart < p.block; apart *= 2u) {
        for (var i = thread; i < ELEMENTS / 2u; i += THREADS) {
            let at = i / apart * 2u * apart + i % apart;
            let x = all[at];
            let y = all[at + apart];
            all[at] = x + y;
            all[at + apart] = x - y;
        }
        workgroupBarrier();
    }
    let unit = 1.0 / sqrt(f32(p.block));
    for (var i = thread; i < ELEMENTS; i += THREADS) {
        if first + i < p.count {
            arena[p.values + first + i] = all[i] * unit;
        }
    }
}
