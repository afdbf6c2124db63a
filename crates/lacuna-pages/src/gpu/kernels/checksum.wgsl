// The checksum of a flat range: the sum, modulo 2^32, of every word times an odd number that
// depends on its position, so that pages that changed places do not cancel out. One partial sum
// per workgroup; the host adds them up. Nothing outside the range is read.

struct Part {
    first: u32, // where the part begins in `memory`, in words
    words: u32, // words of the part
    base: u32,  // the position of the part's first word in the whole range
}

var<immediate> part: Part;

@group(0) @binding(0) var<storage, read_write> memory: array<u32>;
@group(0) @binding(1) var<storage, read_write> partials: array<u32>;

var<workgroup> sums: array<u32, 128>;

@compute @workgroup_size(128)
fn checksum(
    @builtin(global_invocation_id) thread: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    var sum = 0u;
    for (var word = thread.x; word < part.words; word += groups.x * 128u) {
        sum += memory[part.first + word] * (2u * (part.base + word) + 1u);
    }
    sums[lane] = sum;
    workgroupBarrier();
    for (var half = 64u; half > 0u; half /= 2u) {
        if lane < half {
            sums[lane] += sums[lane + half];
        }
        workgroupBarrier();
    }
    if lane == 0u {
        partials[group.x] = sums[0];
    }
}
