// Copy the text beside a button, or select it where the browser lets no page write to the clipboard.
"use strict";
for (const button of document.querySelectorAll("button.copy")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const text = button.parentElement.querySelector("pre");
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "Copied";
    } catch (error) {
      getSelection().selectAllChildren(text);
      button.textContent = "Selected: copy it now";
    }
  });
}
