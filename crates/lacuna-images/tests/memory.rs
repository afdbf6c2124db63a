//! Files that claim to be more than they are take no memory for it.
#![expect(
    unsafe_code,
    reason = "a global allocator that counts is unsafe to implement"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use image::{ExtendedColorType, ImageEncoder, codecs::png::PngEncoder};
use lacuna_images::{Error, Format, Header, Image, Limits};

thread_local! {
    /// Bytes that this thread has allocated, less those that it gave back, and the most there were.
    static NOW: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

/// The system's allocator, counting the bytes of each thread. No test here moves memory between threads.
struct Counting;

// SAFETY: every call is passed to the system's allocator as it came. `realloc` and `alloc_zeroed` are the default
// ones, which call these.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NOW.set(NOW.get() + layout.size() as isize);
        MOST.set(MOST.get().max(NOW.get()));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.set(NOW.get() - layout.size() as isize);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What comes of a file, and the most bytes that it took beside it.
fn decoded(file: &[u8]) -> (Result<Image, Error>, isize) {
    let before = NOW.get();
    MOST.set(before);
    let header = Header::read(file, &Limits::default());
    let image = header.and_then(|header| header.decode(file));
    (image, MOST.get() - before)
}

/// A PNG of so many pixels a side, with a color profile of so many bytes.
fn png(side: u32, profile: usize) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = PngEncoder::new(&mut file);
    let profile = vec![0; profile];
    encoder.set_icc_profile(profile).expect("PNG has profiles");
    let pixels = vec![7; side as usize * side as usize * 3];
    let written = encoder.write_image(&pixels, side, side, ExtendedColorType::Rgb8);
    written.expect("written to memory");
    file
}

#[test]
fn a_pngs_profile_takes_no_memory() {
    // One pixel, in a file a thousandth as long as what it unpacks to.
    let bomb = png(1, 64 << 20);
    assert!(bomb.len() < 1 << 20, "{} bytes", bomb.len());
    let (image, most) = decoded(&bomb);
    assert_eq!(image.expect("an image").pixels(), [7; 3]);
    assert!(most < 4 << 20, "{most} bytes");
    // Nor beside pixels.
    let large = png(1000, 15 << 20);
    let header = Header::read(&large, &Limits::default()).expect("an image");
    let (image, most) = decoded(&large);
    assert_eq!(image.expect("an image").width(), 1000);
    assert!(most as u64 <= header.decoding_bytes(), "{most} bytes");
}

#[test]
fn a_pngs_text_takes_no_memory_and_does_not_matter() {
    let plain = png(1, 0);
    // Behind the signature and the first chunk. No checksum is right.
    let (head, tail) = plain.split_at(8 + 12 + 13);
    for kind in [b"tEXt", b"zTXt", b"iTXt"] {
        let text = [b"Comment\0\0\0\0\0\0", &[b'a'; 8 << 20][..]].concat();
        let length = (text.len() as u32).to_be_bytes();
        let chunk = [&length[..], kind, &text, b"none"].concat();
        let (image, most) = decoded(&[head, &chunk, tail].concat());
        assert_eq!(image.expect("an image").pixels(), [7; 3]);
        assert!(most < 1 << 20, "{most} bytes");
        // One that goes beyond the file ends it.
        let (image, _) = decoded(&[head, &u32::MAX.to_be_bytes(), kind, tail].concat());
        assert!(matches!(image, Err(Error::Damaged { .. })), "{image:?}");
    }
}

/// A chunk of a WebP file that says that it has so many bytes.
fn claiming(kind: &[u8; 4], contents: &[u8], length: u32) -> Vec<u8> {
    let mut chunk = [&kind[..], &length.to_le_bytes(), contents].concat();
    chunk.resize(chunk.len().next_multiple_of(2), 0);
    chunk
}

fn chunk(kind: &[u8; 4], contents: &[u8]) -> Vec<u8> {
    claiming(kind, contents, contents.len() as u32)
}

/// A WebP file of one pixel, by its header, with these flags.
fn webp(flags: u8, chunks: &[Vec<u8>]) -> Vec<u8> {
    let header = [flags, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let chunks = [&[chunk(b"VP8X", &header)], chunks].concat().concat();
    let length = chunks.len() as u32 + 4;
    [b"RIFF", &length.to_le_bytes()[..], b"WEBP", &chunks].concat()
}

/// One red pixel without loss.
const PIXEL: [u8; 14] = [
    0x2F, 0, 0, 0, 0x10, 0x07, 0x10, 0x11, 0x11, 0x88, 0x88, 0xFE, 0x07, 0,
];
const HAS_EXIF: u8 = 8;
const IS_ANIMATED: u8 = 2;

/// Why a WebP file is refused that takes no memory.
fn refusal(file: &[u8]) -> String {
    let (refused, most) = decoded(file);
    let Err(
        error @ Error::Damaged {
            format: Format::WebP,
            ..
        },
    ) = refused
    else {
        panic!("{refused:?}")
    };
    assert!(most < 1 << 20, "{most} bytes for: {error}");
    error.to_string()
}

#[test]
fn chunks_that_go_beyond_the_file_are_refused() {
    let whole = webp(HAS_EXIF, &[chunk(b"VP8L", &PIXEL), chunk(b"EXIF", b"abcd")]);
    let (image, _) = decoded(&whole);
    assert_eq!(image.expect("an image").width(), 1);
    // 256 MiB, so that a test that fails does not end the process.
    for kind in [b"EXIF", b"ICCP", b"XMP ", b"ALPH", b"VP8 "] {
        let beyond = claiming(kind, b"abcd", 1 << 28);
        let message = refusal(&webp(HAS_EXIF, &[chunk(b"VP8L", &PIXEL), beyond]));
        let kind = kind.escape_ascii();
        let wanted = format!("`{kind}` claims 268435456 bytes, and 4 are left");
        assert!(message.contains(&wanted), "{message}");
    }
    // The decoder looks for what a frame is made of behind the frame's header.
    let inner = [chunk(b"VP8L", &PIXEL), claiming(b"EXIF", b"abcd", 1 << 28)].concat();
    let frame = [vec![0; 16], inner].concat();
    let animation = [chunk(b"ANIM", &[0; 6]), chunk(b"ANMF", &frame)];
    let message = refusal(&webp(HAS_EXIF | IS_ANIMATED, &animation));
    assert!(message.contains("`EXIF` claims"), "{message}");
}

/// The header of a lossy frame, and bytes that decode to something.
fn lossy(width: u16, height: u16) -> Vec<u8> {
    let tag = [0x10, 0x80, 0x02, 0x9D, 0x01, 0x2A];
    let size = [width.to_le_bytes(), height.to_le_bytes()].concat();
    [&tag[..], &size, &[0; 1 << 16]].concat()
}

/// The header of a frame without loss.
fn lossless(width: u32, height: u32) -> Vec<u8> {
    let size = (width - 1) | (height - 1) << 14;
    [&[0x2F][..], &size.to_le_bytes(), &[0; 64]].concat()
}

#[test]
fn frames_that_are_larger_than_the_image_are_not_decoded() {
    // 4 million pixels of an image of one.
    for [width, height] in [[2000, 2000], [2, 1], [1, 2]] {
        for frame in [
            chunk(b"VP8 ", &lossy(width, height)),
            chunk(b"VP8L", &lossless(width.into(), height.into())),
        ] {
            let wanted = format!("{width} x {height} pixels, and the image 1 x 1");
            let message = refusal(&webp(0, std::slice::from_ref(&frame)));
            assert!(message.contains(&wanted), "{message}");
            let short = [&claiming(b"VP8X", b"", 0)[..], &frame].concat();
            let file = [b"RIFF\xFF\xFF\0\0WEBP", &short[..]].concat();
            assert!(refusal(&file).contains("`VP8X` has only 0 bytes"));
            let frame = [vec![0; 16], frame].concat();
            let animation = [chunk(b"ANIM", &[0; 6]), chunk(b"ANMF", &frame)];
            let message = refusal(&webp(IS_ANIMATED, &animation));
            assert!(message.contains(&wanted), "{message}");
        }
    }
}

#[test]
fn bytes_after_an_image_are_left_alone() {
    let whole = webp(0, &[chunk(b"VP8L", &PIXEL)]);
    for after in [
        &b"0"[..],
        b"more bytes of somebody",
        &claiming(b"mine", b"", 1 << 28),
    ] {
        let (image, most) = decoded(&[&whole[..], after].concat());
        assert!(image.is_ok() && most < 1 << 20, "{image:?}");
    }
}
