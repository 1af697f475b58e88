// The zone of this browser, and the one-time link: its form is sent by itself. Without JavaScript there is its button.
"use strict";
document.cookie = "outlast_zone=" + encodeURIComponent(Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC") + "; path=/; max-age=31536000; samesite=strict";
const form = document.querySelector("[data-login]");
if (form) form.requestSubmit();
