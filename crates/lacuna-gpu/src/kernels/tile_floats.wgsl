// The kernel for many tokens and weights that are floats: 64 rows and 64 tokens to a workgroup, four of each to a thread,
// whose elements are brought to shared memory a unit at a time. Units come in the order of the lanes that have them.

const THREADS = 256u;

// The `f`-th four elements of row or token `i`, at `f TILE + i`.
var<workgroup> weight_fours: array<vec4<f32>, 256>;
var<workgroup> input_fours: array<vec4<f32>, 256>;

fn add_rows(sums: vec4<f32>, at: u32, input: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(
        add_four(sums.x, weight_fours[at], input),
        add_four(sums.y, weight_fours[at + 16u], input),
        add_four(sums.z, weight_fours[at + 32u], input),
        add_four(sums.w, weight_fours[at + 48u], input),
    );
}

@compute @workgroup_size(THREADS)
fn tile(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let row = group.x * TILE;
    let own_share = share(group.y, TILE);
    let first = own_share.x;
    let count = own_share.y;
    if count == 0u {
        return;
    }
    begin(thread);
    // What this thread brings: four elements of a row and of a token. Beyond the last, the last again.
    let own = thread % TILE;
    let own_four = thread / TILE;
    let own_row = place_of(min(row + own, p.count - 1u));
    let own_token = input_row(first + min(own, count - 1u));
    // And what it computes: every sixteenth of each.
    let in_rows = thread % 16u;
    let in_tokens = thread / 16u;

    var all_a = vec4<f32>();
    var all_b = vec4<f32>();
    var all_c = vec4<f32>();
    var all_d = vec4<f32>();
    for (var lane = 0u; lane < min(LANES, p.units); lane++) {
        var sum_a = vec4<f32>();
        var sum_b = vec4<f32>();
        var sum_c = vec4<f32>();
        var sum_d = vec4<f32>();
        for (var number = lane; number < p.units; number += LANES) {
            if own_four < FOURS {
                weight_fours[thread] = load_four(own_row, number, own_four);
                input_fours[thread] = four(own_token, 4u * (number * FOURS + own_four));
            }
            workgroupBarrier();
            for (var part = 0u; part < FOURS; part++) {
                let at = part * TILE;
                sum_a = add_rows(sum_a, at + in_rows, input_fours[at + in_tokens]);
                sum_b = add_rows(sum_b, at + in_rows, input_fours[at + in_tokens + 16u]);
                sum_c = add_rows(sum_c, at + in_rows, input_fours[at + in_tokens + 32u]);
                sum_d = add_rows(sum_d, at + in_rows, input_fours[at + in_tokens + 48u]);
            }
            workgroupBarrier();
        }
        all_a += sum_a;
        all_b += sum_b;
        all_c += sum_c;
        all_d += sum_d;
    }
    leave_rows(first, in_tokens, count, row + in_rows, all_a);
    leave_rows(first, in_tokens + 16u, count, row + in_rows, all_b);
    leave_rows(first, in_tokens + 32u, count, row + in_rows, all_c);
    leave_rows(first, in_tokens + 48u, count, row + in_rows, all_d);
}
