// What all threads of a workgroup have: halves of a tree, so that only their number decides the order.

var<workgroup> tree: array<f32, THREADS>;

// The sum of the shares of all threads.
fn together(thread: u32, share: f32) -> f32 {
    tree[thread] = share;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if thread < half {
            tree[thread] += tree[thread + half];
        }
        workgroupBarrier();
    }
    let sum = tree[0];
    workgroupBarrier();
    return sum;
}
