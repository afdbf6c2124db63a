// Each choice of an expert with the matrix of that: a workgroup has choices of one expert, as `bands` has sorted them.

// Where the expert's matrix begins in the window, in sixteen bytes.
var<private> matrix: u32;

// The first place of a workgroup's choices, and how many it has: none if its expert is in another window.
fn share(number: u32, most: u32) -> vec2<u32> {
    let tile = rows[p.tiles / 4u + number];
    let expert = tile.x - p.first_expert;
    if tile.x < p.first_expert || expert >= p.experts {
        return vec2<u32>(0u, 0u);
    }
    matrix = expert * p.expert_size;
    return tile.yz;
}

fn output_row(place: u32) -> u32 {
    return arena[p.order + place];
}

fn input_row(place: u32) -> u32 {
    return output_row(place) / p.used;
}

// Of up to four places; of those beyond, the first again.
fn input_rows(first: u32, count: u32) -> vec4<u32> {
    let most = max(count, 1u) - 1u;
    return vec4<u32>(
        input_row(first),
        input_row(first + min(1u, most)),
        input_row(first + min(2u, most)),
        input_row(first + min(3u, most)),
    );
}
