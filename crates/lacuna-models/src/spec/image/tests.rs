use std::num::NonZeroUsize;

use super::*;

const QWEN: Patches = Patches {
    pixels: 14,
    size: ImageSize::Own {
        square: 2,
        least_pixels: 56 * 56,
        most_pixels: 28 * 28 * 1280,
        longest_edge: None,
    },
    resampling: Resampling::Bicubic,
    frames: Frames::One,
    channels: Channels::Apart,
    order: PatchOrder::Squares {
        side: 2,
        windows: None,
    },
    places: LearnedPlaces::None,
    normed: false,
    mean: [0.5; 3],
    deviation: [0.5; 3],
};

#[test]
fn an_image_is_brought_to_whole_squares_within_bounds() {
    // As `smart_resize` of transformers says.
    for (size, wanted) in [
        ([640, 480], [644, 476]),
        ([28, 28], [56, 56]),
        ([42, 70], [56, 56]),
        ([4032, 3024], [1148, 840]),
        ([3000, 100], [2996, 112]),
        ([20, 4000], [28, 4004]),
        ([1, 200], [28, 812]),
        ([14, 42], [56, 112]),
    ] {
        assert_eq!(QWEN.fit(size), Ok(wanted), "{size:?}");
        assert!(QWEN.takes(QWEN.grid(wanted)), "{size:?}");
    }
    let long = QWEN.fit([1, 20_000]).expect_err("longer than any");
    assert!(long.to_string().contains("1 x 20000"), "{long}");
    assert!(QWEN.fit([1, 201]).is_err() && QWEN.fit([0, 1]).is_err());
}

#[test]
fn an_image_is_brought_to_whole_squares_that_a_side_of_bounds_it() {
    let size = |longest: usize, square: usize, most_pixels| Patches {
        pixels: 14,
        size: ImageSize::Own {
            square,
            least_pixels: 1,
            most_pixels,
            longest_edge: Some(longest),
        },
        order: PatchOrder::Rows,
        ..QWEN
    };
    // As `get_resize_output_image_size` of transformers says.
    let mistral = size(1540, 2, 1540 * 1540);
    for (given, wanted) in [
        ([640, 480], [644, 504]),
        ([4032, 3024], [1540, 1176]),
        ([3024, 4032], [1176, 1540]),
        ([1541, 1541], [1540, 1540]),
        ([1, 1], [28, 28]),
        ([28, 29], [28, 56]),
    ] {
        assert_eq!(mistral.fit(given), Ok(wanted), "{given:?}");
        assert!(mistral.takes(mistral.grid(wanted)), "{given:?}");
    }
    // However long they are.
    assert_eq!(mistral.fit([1, 20_000]), Ok([28, 1540]));
    // And fewer pixels where there are to be fewer.
    let fewer = size(1540, 2, 28 * 28 * 100);
    assert_eq!(fewer.fit([4032, 3024]), Ok([308, 224]));
    assert_eq!(fewer.fit([280, 280]), Ok([280, 280]));
}

#[test]
fn images_are_held_to_as_many_tokens_as_are_said() {
    let within = |least, most| {
        let [least, most] = [least, most].map(NonZeroUsize::new);
        QWEN.within(ImageTokenBounds { least, most }, 2)
    };
    let tokens = |patches: Patches, size| {
        let fitted = patches.fit(size).expect("of a shape that is taken");
        assert!(patches.takes(patches.grid(fitted)), "{size:?}");
        patches.grid(fitted).merged(2).count()
    };
    let photograph = [4032, 3024];
    for most in [1, 2, 7, 100, 1280, 5000] {
        let held = within(0, most).expect("a size of its own");
        assert!(tokens(held, photograph) <= most, "{most}");
        assert!(tokens(held, [8, 8]) <= most, "{most}");
        assert_eq!(held.most(), most * 4);
    }
    assert_eq!(tokens(within(0, 5000).expect("more"), photograph), 4941);
    let least = within(300, 0).expect("a size of its own");
    assert!(tokens(least, [8, 8]) >= 300);
    assert_eq!(tokens(least, photograph), tokens(QWEN, photograph));
    // More at least than files have at most.
    assert!(tokens(within(2000, 0).expect("more"), [8, 8]) <= 2000);
    assert!(within(5, 4).is_err());
    let one = Patches {
        size: ImageSize::Square { per_side: 4 },
        ..QWEN
    };
    let said = ImageTokenBounds {
        most: NonZeroUsize::new(4),
        least: None,
    };
    assert!(one.within(said, 2).is_err());
}

#[test]
fn no_image_has_more_tokens_and_rows_than_the_largest() {
    let sides = [1usize, 28, 29, 100, 280, 999, 1540, 5000];
    for bounds in [
        [0, 0],
        [0, 1],
        [0, 60],
        [0, 100],
        [0, 9000],
        [500, 0],
        [5000, 6000],
    ] {
        let [least, most] = bounds.map(NonZeroUsize::new);
        let bounds = ImageTokenBounds { least, most };
        let patches = Patches {
            size: ImageSize::Own {
                square: 2,
                least_pixels: 1,
                most_pixels: 1540 * 1540,
                longest_edge: Some(1540),
            },
            ..QWEN
        };
        let patches = patches.within(bounds, 2).expect("a size of its own");
        let rows = ImageRows {
            merged: 2,
            merge: Merge::Apart {
                reduced: Some(1e-5),
            },
            width: 8,
            deepstack: [None; ImageRows::MOST_DEEPSTACK],
        };
        let largest = rows.most_grid(&patches);
        for size in sides.iter().flat_map(|&width| sides.map(|it| [width, it])) {
            let fitted = patches.fit(size).expect("of any shape");
            let tokens = patches.grid(fitted).merged(2);
            assert!(patches.takes(patches.grid(fitted)), "{size:?}");
            assert!(tokens.rows <= largest.rows, "{bounds:?} {size:?}");
            assert!(tokens.count() <= largest.count(), "{bounds:?} {size:?}");
        }
        // No more is planned for than any image has.
        let held = most.map_or(3025, |most| most.get().min(3025));
        if least.is_none() {
            assert_eq!(patches.most(), held * 4, "{bounds:?}");
        }
    }
}

#[test]
fn no_image_has_more_patches_than_there_may_be() {
    let sides = [1usize, 13, 14, 27, 29, 100, 999, 5000, 60_000, 1_000_000];
    for width in sides {
        for height in sides {
            let Ok(size) = QWEN.fit([width, height]) else {
                continue;
            };
            let grid = QWEN.grid(size);
            assert!(QWEN.takes(grid), "{width} x {height}: {grid:?}");
            assert_eq!(size, [grid.columns * 14, grid.rows * 14]);
        }
    }
}

#[test]
fn an_image_is_as_large_as_its_tokens_have_room_for() {
    let filled = |tokens: usize| Patches {
        pixels: 16,
        size: ImageSize::Filled {
            square: 3,
            most_pixels: tokens * 48 * 48,
        },
        order: PatchOrder::Rows,
        ..QWEN
    };
    // As `get_aspect_ratio_preserving_size` of transformers says.
    for (size, of_280, of_70) in [
        ([640, 480], [912, 672], [432, 336]),
        ([960, 672], [960, 672], [480, 336]),
        ([4032, 3024], [912, 672], [432, 336]),
        ([8, 8], [768, 768], [384, 384]),
        ([1, 20_000], [48, 13_440], [48, 3360]),
        ([20_000, 1], [13_440, 48], [3360, 48]),
        ([3000, 100], [4368, 144], [2160, 48]),
        ([2, 1999], [48, 13_440], [48, 3360]),
    ] {
        for (tokens, wanted) in [(280, of_280), (70, of_70)] {
            let patches = filled(tokens);
            assert_eq!(patches.fit(size), Ok(wanted), "{size:?}, {tokens}");
            assert!(patches.takes(patches.grid(wanted)), "{size:?}");
        }
    }
    let sides = [0usize, 1, 2, 47, 48, 49, 100, 999, 60_000, 1_000_000];
    for tokens in [1, 2, 3, 70, 280] {
        let patches = filled(tokens);
        assert_eq!(
            [patches.most(), patches.longest()],
            [9 * tokens, 3 * tokens]
        );
        for size in sides.iter().flat_map(|&width| sides.map(|it| [width, it])) {
            let fitted = patches.fit(size).expect("of any shape");
            assert!(patches.takes(patches.grid(fitted)), "{size:?}, {tokens}");
        }
    }
    let within = |least, most| {
        let [least, most] = [least, most].map(NonZeroUsize::new);
        filled(280).within(ImageTokenBounds { least, most }, 3)
    };
    assert_eq!(within(0, 70).expect("fewer"), filled(70));
    assert_eq!(within(70, 0).expect("no less"), filled(280));
    assert_eq!(within(560, 0).expect("more"), filled(560));
    assert!(within(5, 4).is_err());
}
