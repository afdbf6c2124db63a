//! The web page: files built into the program, under a policy that lets the page load nothing else.

use axum::Router;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::get;

/// Path, media type and content.
type Asset = (&'static str, &'static str, &'static str);

const SCRIPT: &str = "text/javascript; charset=utf-8";

/// A module of the page's script, by its path in `web/`.
macro_rules! script {
    ($path:literal) => {
        (
            concat!("/page/", $path),
            SCRIPT,
            include_str!(concat!("../web/", $path)),
        )
    };
}

const ASSETS: [Asset; 16] = [
    (
        "/",
        "text/html; charset=utf-8",
        include_str!("../web/index.html"),
    ),
    (
        "/page/style.css",
        "text/css; charset=utf-8",
        include_str!("../web/style.css"),
    ),
    (
        "/page/icon.svg",
        "image/svg+xml",
        include_str!("../web/icon.svg"),
    ),
    script!("api.js"),
    script!("attachments.js"),
    script!("chats.js"),
    script!("conversation.js"),
    script!("dom.js"),
    script!("main.js"),
    script!("markdown.js"),
    script!("memory.js"),
    script!("pictures.js"),
    script!("settings.js"),
    script!("units.js"),
    script!("vendor/marked.js"),
    (
        "/page/vendor/marked-LICENSE",
        "text/plain; charset=utf-8",
        include_str!("../web/vendor/marked-LICENSE"),
    ),
];

/// The page needs itself and the server, nothing from elsewhere and nothing inline but pictures, which it has itself.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Whether `path` is a file of the page, which says nothing about what the server does.
pub(crate) fn is_asset(path: &str) -> bool {
    ASSETS.iter().any(|asset| asset.0 == path)
}

pub(crate) fn routes<A: Clone + Send + Sync + 'static>() -> Router<A> {
    ASSETS.iter().fold(Router::new(), |router, &asset| {
        router.route(asset.0, get(move || async move { file(asset) }))
    })
}

fn file((_, kind, content): Asset) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, content).into_response()
}
