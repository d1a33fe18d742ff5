// Rewrite times to the browser's zone, with UTC in the title. The server writes UTC: it does not know the zone.
"use strict";
(function () {
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  if (!zone || zone === "UTC" || zone === "Etc/UTC") return;
  const two = (value) => String(value).padStart(2, "0");
  const short = (at) => new Intl.DateTimeFormat("en", { timeZoneName: "short" })
    .formatToParts(at).find((part) => part.type === "timeZoneName").value;

  // The text keeps its shape: with or without year, day, seconds and zone.
  function local(text, at) {
    const day = `${two(at.getMonth() + 1)}-${two(at.getDate())}`;
    const time = `${two(at.getHours())}:${two(at.getMinutes())}`;
    return text
      .replace(/(\d{4}-)?\d\d-\d\d/, (old) => (old.length > 5 ? `${at.getFullYear()}-` : "") + day)
      .replace(/\d\d:\d\d(:\d\d)?/, (old) => (old.length > 5 ? `${time}:${two(at.getSeconds())}` : time))
      .replace("UTC", short(at));
  }

  function rewrite() {
    for (const element of document.querySelectorAll("time[datetime]:not([data-utc])")) {
      const utc = element.textContent;
      element.dataset.utc = utc;
      element.title = utc.endsWith("UTC") ? utc : `${utc} UTC`;
      element.textContent = local(utc, new Date(element.dateTime));
    }
    for (const bar of document.querySelectorAll("[data-at]:not([data-utc])")) {
      const title = bar.querySelector("title");
      bar.dataset.utc = title.textContent;
      title.textContent = local(title.textContent, new Date(bar.dataset.at));
    }
    // Headings of columns of such times. Fields stay in UTC, and say so.
    for (const heading of document.querySelectorAll("th")) {
      for (const element of [heading, ...heading.querySelectorAll("*")]) {
        for (const part of element.childNodes) {
          if (part.nodeType === Node.TEXT_NODE) part.data = part.data.replace("(UTC)", "(local time)");
        }
      }
    }
    for (const cell of document.querySelectorAll("[data-label*='(UTC)']")) {
      cell.dataset.label = cell.dataset.label.replace("(UTC)", "(local time)");
    }
    for (const footer of document.querySelectorAll("[data-zone]:not([data-utc])")) {
      footer.dataset.utc = footer.textContent;
      footer.textContent = `Times are in ${zone}; point at one for UTC. Fields take UTC.`;
    }
  }
  rewrite();
  new MutationObserver(rewrite).observe(document.body, { childList: true, subtree: true });
})();
